// The state of the server. While it does not answer, the page asks again every few seconds.

import { listModels } from "./api.js";
import { dispatch, set } from "./store.js";

const AGAIN_MS = 3000;
let timer = null;

/** Ask the server for its models, and note whether it answers. */
export async function checkServer() {
  clearTimeout(timer);
  try {
    dispatch({ type: "server", server: "up", models: await listModels() });
  } catch (error) {
    if (error.status === 401) {
      dispatch({ type: "server", server: "locked" });
      set({ panel: "key" });
      return;
    }
    dispatch({ type: "server", server: "down" });
    timer = setTimeout(checkServer, AGAIN_MS);
  }
}

/** Return the state of a model, such as "loading"; a server with several models loads them when a request needs them. */
export async function modelState(name) {
  const models = await listModels().catch(() => []);
  return (models.find((one) => one.id === name) ?? models[0])?.state ?? "";
}
