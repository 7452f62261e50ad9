// The start of the page.

import { App } from "./components/app.js";
import { newDraft, open, openNew, refresh } from "./conversations.js";
import { loadHeads, onChange, openDatabase } from "./database.js";
import { html, render } from "./html.js";
import { checkServer } from "./server.js";
import { dispatch, getState } from "./store.js";
import { applyTheme } from "./theme.js";

async function start() {
  applyTheme();
  const isStored = await openDatabase();
  const notice = isStored ? null : "This browser does not store conversations here. They end with this tab.";
  dispatch({ type: "ready", heads: await loadHeads(), draft: newDraft(), notice });
  const root = document.getElementById("app");
  root.replaceChildren();
  render(html`<${App} />`, root);
  onChange(refresh);
  window.addEventListener("hashchange", () => {
    const id = location.hash.slice(1);
    if (id !== (getState().current ?? "")) open(id);
  });
  window.addEventListener("online", checkServer);
  if (location.hash.length > 1) await open(location.hash.slice(1));
  else openNew();
  await checkServer();
  await startWorker().catch(() => null);
}

/** Start the worker that loads the page while the server is down. Browsers have it for TLS and the local machine only. */
async function startWorker() {
  if (!navigator.serviceWorker) return;
  const policy = window.trustedTypes?.createPolicy("genai", { createScriptURL: (url) => url });
  const address = "page/worker.js";
  await navigator.serviceWorker.register(policy?.createScriptURL(address) ?? address, { scope: "./" });
  // The files that this page loaded before the worker began.
  const files = performance.getEntriesByType("resource").map((one) => one.name);
  const cache = await caches.open("genai-page");
  await cache.addAll(["./", ...new Set(files.filter((one) => one.includes("/page/")))]);
}

start();
