// Drives the chat page in a browser: node drive.mjs CHECK. The environment has SERVER, LOCKED, ROUTER, KEY and BROWSER.

import assert from "node:assert/strict";
import { readFile, writeFile } from "node:fs/promises";
import net from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { Transform } from "node:stream";
import { setTimeout as sleep } from "node:timers/promises";

import { chromium } from "playwright-core";

const { SERVER, LOCKED, ROUTER, KEY, BROWSER } = process.env;
const LONG = 60_000;

/** A tab that fails the check if the page logs an error. */
async function open(context, url = SERVER) {
  const page = await context.newPage();
  page.setDefaultTimeout(LONG);
  page.errors = [];
  page.on("pageerror", (error) => page.errors.push(String(error)));
  page.on("console", (message) => message.type() === "error" && page.errors.push(message.text()));
  page.on("request", (request) => {
    if (!/^(blob|data):/.test(request.url()) && new URL(request.url()).origin !== new URL(url).origin) {
      page.errors.push(`request to ${request.url()}`);
    }
  });
  page.changed = (body) => body;
  // Playwright does not see every request of a page that a service worker controls, so the page's `fetch` is changed.
  await page.exposeFunction("changed", (body) => page.changed(body));
  await page.addInitScript(() => {
    const send = window.fetch;
    window.fetch = async (path, options = {}) => {
      if (!String(path).endsWith("/chat/completions")) return send(path, options);
      const changed = await window.changed(JSON.parse(options.body));
      if (typeof changed === "string") return new Response(changed, { headers: { "content-type": "text/event-stream" } });
      return send(path, { ...options, body: JSON.stringify(changed) });
    };
  });
  await page.goto(url);
  await page.waitForSelector("#composer");
  await page.waitForSelector(".model option:text('pebble'), dialog", { state: "attached" });
  return page;
}

const replies = (page) => page.locator(".message.assistant");
const ended = (page, count = 1) => page.waitForFunction((n) => document.querySelectorAll(".costs").length === n, count);
/** Wait until a reply consists of a text. The page draws Markdown a moment after it shows that a reply has ended. */
const reads = (reply, text) => reply.locator(".markdown").filter({ hasText: new RegExp(`^${text}$`) }).waitFor();
const scrolls = (page) => page.evaluate(() => document.documentElement.scrollWidth > innerWidth);

async function send(page, text, { isLong = false, tokens = 400 } = {}) {
  if (isLong) makeLong(page, tokens);
  await page.fill("#composer", text);
  await page.press("#composer", "Enter");
}

/** Let replies continue after their end, so that they take a while. Return a list that gets the bodies of the requests. */
function makeLong(page, tokens = 400) {
  const bodies = [];
  page.changed = (body) => {
    bodies.push({ ...body, ignore_eos: true, max_tokens: tokens, temperature: 0 });
    return bodies.at(-1);
  };
  return bodies;
}

/** The reply that the server gives to a body without a stream. */
async function whole(body) {
  const { stream_options: _, ...rest } = body;
  const headers = { "content-type": "application/json" };
  const answer = await fetch(`${SERVER}v1/chat/completions`, { method: "POST", headers, body: JSON.stringify({ ...rest, stream: false }) });
  return (await answer.json()).choices[0].message.content;
}

/** The raw text of the last message in the database, because the page shows Markdown. */
const stored = (page) =>
  page.evaluate(async () => {
    const { getState } = await import("/page/store.js");
    return Object.values(getState().messages).sort((a, b) => a.created - b.created).at(-1);
  });

function conversation(count, id = "c") {
  const texts = ["What is a `list`?", "A list has *items*:\n\n- one\n- two\n\n```python\nprint([1, 2])\n```\n"];
  const messages = Array.from({ length: count }, (_, n) => ({
    id: `m${n}`,
    parent: n ? `m${n - 1}` : null,
    role: n % 2 ? "assistant" : "user",
    content: `${n} ${texts[n % 2]}`,
    created: n + 1,
    ...(n % 2 ? { status: "done", finish: "stop", model: "pebble" } : {}),
  }));
  const head = { id, title: `Conversation ${id}`, created: 1, updated: 2, leaf: messages.at(-1).id };
  return { ...head, model: "", system: "", reasoning: "", options: {}, messages };
}

async function load(page, conversations) {
  const path = join(tmpdir(), `genai-page-${process.pid}.json`);
  const data = typeof conversations === "string" ? conversations : JSON.stringify({ format: "genai-conversations", version: 1, conversations });
  await writeFile(path, data);
  await page.setInputFiles("[data-file=import]", path);
  await page.waitForSelector(".banner[role=alert]");
  const notice = await page.innerText(".banner[role=alert]");
  await page.click("[aria-label='Close this notice']");
  return notice;
}

/**
 * A connection to the server that can be cut, at an address that stays the same. While `isSlow` is true, data arrives
 * slowly, because the small model can be faster than the browser of a busy machine.
 */
async function cable() {
  const target = new URL(SERVER);
  const sockets = new Set();
  const state = { isSlow: false };
  const trickle = () =>
    new Transform({
      async transform(data, _, done) {
        let sent = 0;
        for (; state.isSlow && sent < data.length; sent += 500) {
          this.push(data.subarray(sent, sent + 500));
          await sleep(10);
        }
        done(null, data.subarray(sent));
      },
    });
  const server = net.createServer((client) => {
    const upstream = net.connect(target.port, target.hostname);
    for (const socket of [client, upstream]) {
      sockets.add(socket);
      socket.on("error", () => null);
      socket.on("close", () => (client.destroy(), upstream.destroy(), sockets.delete(socket)));
    }
    client.pipe(upstream).pipe(trickle()).pipe(client);
  });
  const listen = (port) => new Promise((resolve) => server.listen(port, "127.0.0.1", resolve));
  await listen(0);
  const { port } = server.address();
  const hangUp = () => sockets.forEach((socket) => socket.destroy());
  return Object.assign(state, {
    url: `http://127.0.0.1:${port}/`,
    hangUp,
    down: () => (hangUp(), new Promise((resolve) => server.close(resolve))),
    up: () => listen(port),
  });
}

const checks = {
  async send({ context }) {
    const page = await open(context);
    await send(page, "What is 12 + 7?");
    await ended(page);
    await reads(replies(page), "19");
    assert.match(await page.innerText(".costs"), /^pebble · 2 tokens · [\d.]+ tokens\/s · first after [\d.]+ s · 0 of 17 prompt tokens cached$/);
    assert.equal(await page.inputValue("input.title"), "What is 12 + 7?");
    await send(page, "What is 20 - 5?");
    await ended(page, 2);
    await page.reload();
    await ended(page, 2);
    assert.equal(await page.locator(".message.user .text").first().innerText(), "What is 12 + 7?");
    return page;
  },

  async stream({ context }) {
    const wire = await cable();
    const page = await open(context, wire.url);
    wire.isSlow = true;
    await page.evaluate(() => {
      window.said = [];
      const note = () => window.said.push(document.getElementById("said").textContent);
      new MutationObserver(note).observe(document.getElementById("said"), { childList: true, characterData: true, subtree: true });
      window.lengths = [];
      const grow = () => window.lengths.push(document.querySelector(".message.assistant .markdown")?.textContent.length ?? 0);
      new MutationObserver(grow).observe(document.getElementById("app"), { childList: true, characterData: true, subtree: true });
    });
    await send(page, "Tell me a story.", { isLong: true, tokens: 200 });
    await page.waitForSelector("[aria-busy=true] .markdown:not(:empty)");
    await ended(page);
    const { said, lengths } = await page.evaluate(() => ({ said: window.said, lengths: window.lengths }));
    const sizes = new Set(lengths.filter((one) => one > 0));
    assert.ok(sizes.size > 5, `the text grew in ${sizes.size} steps`);
    assert.equal(said.length, 2);
    assert.equal(said[0], "The reply has started.");
    assert.match(said[1], /^The reply is complete\. ./);
    assert.equal(await page.locator(".message.assistant .note").first().innerText(), "The reply reached its maximum length.");
    return page;
  },

  async stop({ context }) {
    const wire = await cable();
    const page = await open(context, wire.url);
    wire.isSlow = true;
    await send(page, "Tell me a story.", { isLong: true, tokens: 900 });
    await page.waitForSelector("[aria-busy=true] .markdown:not(:empty)");
    await page.click("footer button:text-is('Stop')");
    await ended(page);
    assert.equal(await page.locator(".message.assistant .note").first().innerText(), "You stopped the reply.");
    wire.isSlow = false;
    const { content } = await stored(page);
    assert.ok(content.length > 0);
    for (;;) {
      const metrics = await (await fetch(`${SERVER}metrics`)).text();
      if (/^genai_requests_running\{.*\} 0$/m.test(metrics)) break;
    }
    page.changed = (body) => body;
    await page.click(".message.assistant >> text=Retry");
    await page.waitForFunction(() => document.querySelector(".message.assistant .branches")?.textContent.includes("2 / 2"));
    await page.click(".message.assistant >> [aria-label='Previous branch']");
    await page.waitForSelector("text=You stopped the reply.");
    assert.equal((await replies(page).count()), 1);
    return page;
  },

  async branch({ context }) {
    const page = await open(context);
    await send(page, "What is 12 + 7?");
    await ended(page);
    await send(page, "What is 1 + 1?");
    await ended(page, 2);
    await page.locator(".message.user").first().getByText("Edit").click();
    await page.fill("[aria-label='Edit the message']", "What is 20 - 5?");
    await page.click("text=Send as a new branch");
    await ended(page, 1);
    await reads(replies(page), "15");
    await page.click("[aria-label='Previous branch']");
    await ended(page, 2);
    await reads(replies(page).first(), "19");
    await page.reload();
    await ended(page, 2);
    await page.click("[aria-label='Next branch']");
    await ended(page, 1);
    assert.equal(await page.locator(".branches span").innerText(), "2 / 2");
    return page;
  },

  async attach({ context }) {
    const page = await open(context);
    const bodies = makeLong(page, 5);
    const files = [
      { name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("blue ```fence``` sky") },
      { name: "picture.png", mimeType: "image/png", buffer: Buffer.from([137, 80, 0, 255]) },
      { name: "large.txt", mimeType: "text/plain", buffer: Buffer.alloc(2 ** 20 + 1, "a") },
    ];
    await page.setInputFiles("[data-file=attach]", files[1]);
    await page.waitForSelector("text=picture.png is not a text in UTF-8. Attach a text file.");
    await page.setInputFiles("[data-file=attach]", files[2]);
    await page.waitForSelector("text=large.txt has 1.0 MiB. Attach a text of at most 1 MiB.");
    await page.setInputFiles("[data-file=attach]", [files[0], files[0]]);
    await page.click("[aria-label='Remove notes.txt'] >> nth=0");
    await page.fill("#composer", "Which colour?");
    await page.click("text=Send");
    await ended(page);
    const text = "File notes.txt:\n````\nblue ```fence``` sky\n````\n\nWhich colour?";
    assert.deepEqual(bodies[0].messages, [{ role: "user", content: text }]);
    await page.reload();
    await page.click("summary:has-text('notes.txt')");
    assert.equal(await page.innerText(".files pre"), "blue ```fence``` sky");
    return page;
  },

  async reload({ context }) {
    const wire = await cable();
    const page = await open(context, wire.url);
    const bodies = makeLong(page, 700);
    wire.isSlow = true;
    await page.fill("#composer", "Tell me a story.");
    await page.press("#composer", "Enter");
    await page.waitForSelector("[aria-busy=true] .markdown:not(:empty)");
    wire.isSlow = false;
    await page.reload();
    await ended(page);
    const { content, status } = await stored(page);
    assert.equal(status, "done");
    assert.equal(content, await whole(bodies[0]));
    return page;
  },

  /** A model that is loaded when a request needs it: the page says so, and a reload in the meantime loses no reply. */
  async router({ context }) {
    const page = await open(context, ROUTER);
    await page.selectOption(".model", "second");
    await send(page, "What is 12 + 7?");
    await page.waitForSelector(".waiting:text('Loading the model')");
    await page.reload();
    await page.waitForSelector(".waiting:text('Loading the model')");
    await ended(page);
    await reads(replies(page), "19");
    assert.match(await page.innerText(".costs"), /^second · 2 tokens/);
    return page;
  },

  async tabs({ context }) {
    const wire = await cable();
    const page = await open(context, wire.url);
    const other = await open(context, wire.url);
    const bodies = makeLong(page, 300);
    wire.isSlow = true;
    await page.fill("#composer", "Tell me a story.");
    await page.press("#composer", "Enter");
    await other.click("nav a:has-text('Tell me a story.')");
    await other.waitForSelector("[aria-busy=true] .markdown:not(:empty)");
    wire.isSlow = false;
    await Promise.all([ended(page), ended(other)]);
    const [mine, others] = [await stored(page), await stored(other)];
    assert.equal(mine.content, await whole(bodies[0]));
    assert.equal(others.content, mine.content);
    await other.fill("input.title", "A story");
    await other.press("input.title", "Enter");
    await page.waitForSelector("nav a:has-text('A story')");
    await page.click("[aria-label='Delete A story']");
    await page.click(".danger");
    await other.waitForSelector("nav a", { state: "detached" });
    assert.deepEqual(other.errors, []);
    return page;
  },

  async down({ context }) {
    const wire = await cable();
    const page = await open(context, wire.url);
    await send(page, "What is 12 + 7?");
    await ended(page);
    await page.waitForFunction(() => caches.open("genai-page").then((cache) => cache.keys()).then((keys) => keys.length > 20));
    await wire.down();
    await send(page, "What is 20 - 5?");
    await page.waitForSelector(".error:has-text('The server does not answer.')");
    await page.waitForSelector("text=The page tries again every few seconds.");
    await page.reload(); // the worker has the page
    await page.waitForSelector(".error");
    await page.fill("#composer", "still usable");
    const saved = page.waitForEvent("download");
    await page.click("text=Export all");
    assert.match(await readFile(await (await saved).path(), "utf8"), /What is 20 - 5\?/);
    await wire.up();
    await page.waitForSelector("text=The page tries again every few seconds.", { state: "detached" });
    assert.equal(await page.inputValue("#composer"), "still usable");
    await page.fill("#composer", "");
    await replies(page).last().getByText("Retry").click();
    await ended(page, 2);
    await reads(replies(page).last(), "15");
    // A connection that is lost during a reply does not end the reply.
    const bodies = makeLong(page, 500);
    wire.isSlow = true;
    await page.fill("#composer", "Tell me a story.");
    await page.press("#composer", "Enter");
    await page.waitForSelector("[aria-busy=true] .markdown:not(:empty)");
    wire.hangUp();
    wire.isSlow = false;
    await ended(page, 3);
    assert.equal((await stored(page)).content, await whole(bodies[0]));
    page.errors = page.errors.filter((one) => !/ERR_/.test(one));
    return page;
  },

  async narrow({ browser }) {
    const context = await browser.newContext({ viewport: { width: 320, height: 640 } });
    const page = await open(context);
    const wide = conversation(2);
    wide.messages[1].content = `${"x".repeat(300)}\n\n\`\`\`\n${"y ".repeat(200)}\n\`\`\`\n\n|${" a |".repeat(30)}\n|${"---|".repeat(30)}\n|${" b |".repeat(30)}\n`;
    await page.click("header [aria-label=Conversations]");
    assert.match(await load(page, [wide]), /^1 conversation was added/);
    await page.click("header [aria-label=Conversations]");
    assert.equal(await scrolls(page), false);
    await page.click("nav a");
    await ended(page);
    assert.equal(await scrolls(page), false);
    await page.click("[aria-label=Settings]");
    assert.equal(await scrolls(page), false);
    await page.keyboard.press("Escape");
    await send(page, "What is 12 + 7?");
    await ended(page, 2);
    assert.equal(await scrolls(page), false);
    return page;
  },

  async keyboard({ context }) {
    const wire = await cable();
    const page = await open(context, wire.url);
    const focus = () => page.evaluate(() => document.activeElement.getAttribute("aria-label") ?? document.activeElement.textContent.trim());
    const tabTo = async (name) => {
      for (let n = 0; n < 60; n += 1) {
        if ((await focus()) === name) return;
        await page.keyboard.press("Tab");
      }
      assert.fail(`no focus on ${name}`);
    };
    assert.equal(await focus(), "Message");
    await page.keyboard.type("What is 12");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("+ 7?");
    await page.keyboard.press("Enter");
    await ended(page);
    assert.equal(await page.innerText(".message.user .text"), "What is 12\n+ 7?");
    assert.equal(await focus(), "Message");
    await page.keyboard.press("ArrowUp");
    assert.equal(await focus(), "Edit the message");
    await page.keyboard.press("Escape");
    assert.equal(await focus(), "Message");
    await tabTo("Settings");
    await page.keyboard.press("Enter");
    await page.waitForSelector("dialog");
    await page.keyboard.press("Escape");
    await page.waitForSelector("dialog", { state: "detached" });
    assert.equal(await focus(), "Settings");
    await page.keyboard.press("Alt+n");
    assert.equal(await focus(), "Message");
    makeLong(page, 900);
    wire.isSlow = true;
    await page.keyboard.type("Tell me a story.");
    await page.keyboard.press("Enter");
    await page.waitForSelector("[aria-busy=true] .markdown:not(:empty)");
    await page.keyboard.press("Escape");
    await page.waitForSelector("text=You stopped the reply.");
    await tabTo("Delete Tell me a story.");
    await page.keyboard.press("Enter");
    assert.equal(await focus(), "Keep");
    await page.keyboard.press("Shift+Tab");
    await page.keyboard.press("Enter");
    await page.waitForSelector("[aria-label='Delete Tell me a story.']", { state: "detached" });
    return page;
  },

  async thousand({ context }) {
    const page = await open(context);
    const many = Array.from({ length: 500 }, (_, n) => conversation(2, `other-${n}`));
    await load(page, [{ ...conversation(1000), title: "A long one" }, ...many]);
    await page.fill("[type=search]", "LONG a");
    await page.click("nav a");
    await ended(page, 20);
    await page.click("#composer");
    await page.evaluate(() => {
      window.delays = [];
      const area = document.getElementById("composer");
      area.addEventListener("keydown", () => {
        const begin = performance.now();
        requestAnimationFrame(() => setTimeout(() => window.delays.push(performance.now() - begin)));
      });
    });
    await page.keyboard.type("A text of forty characters, more or less", { delay: 5 });
    assert.equal(await page.inputValue("#composer"), "A text of forty characters, more or less");
    const delays = (await page.evaluate(() => window.delays)).sort((a, b) => a - b);
    console.log(`1,000 messages: ${delays[delays.length >> 1].toFixed(1)} ms from a key to its frame (median)`);
    await page.click("text=Show earlier messages (960)");
    await ended(page, 40);
    await page.fill("[type=search]", "other-77");
    assert.equal(await page.locator("nav li").count(), 1);
    return page;
  },

  async transfer({ context, browser }) {
    const page = await open(context);
    await page.setInputFiles("[data-file=attach]", { name: "a.txt", mimeType: "text/plain", buffer: Buffer.from("blue") });
    await send(page, "What is 12 + 7?");
    await ended(page);
    await page.click(".message.assistant >> text=Retry");
    await page.waitForFunction(() => document.querySelector(".branches")?.textContent.includes("2 / 2"));
    await ended(page);
    const exported = async (tab) => {
      const saved = tab.waitForEvent("download");
      await tab.click("text=Export all");
      return readFile(await (await saved).path(), "utf8");
    };
    const text = await exported(page);
    const data = JSON.parse(text);
    assert.equal(data.conversations[0].messages.length, 3);
    assert.match(await load(page, text), /^0 conversations were added/);
    const other = await open(await browser.newContext());
    assert.match(await load(other, text), /^1 conversation was added/);
    const again = JSON.parse(await exported(other));
    assert.deepEqual(again.conversations, data.conversations);
    const wrong = structuredClone(data);
    wrong.conversations[0].messages[0].role = "system";
    const cyclic = structuredClone(data);
    for (const one of cyclic.conversations[0].messages) one.parent = cyclic.conversations[0].messages[0].id;
    const errors = [
      ["no JSON", /^The file is not JSON/],
      ["[]", /^The file is not an export of this page/],
      [JSON.stringify(wrong), /a message is incomplete. Nothing was added/],
      [JSON.stringify(cyclic), /do not belong together. Nothing was added/],
      [JSON.stringify({ ...data, conversations: [null] }), /a conversation is incomplete/],
    ];
    for (const [content, message] of errors) assert.match(await load(other, content), message);
    assert.deepEqual(JSON.parse(await exported(other)).conversations, data.conversations);
    data.conversations[0].updated += 1;
    assert.match(await load(other, JSON.stringify(data)), /^1 conversation was added/);
    assert.equal(await other.locator("nav li").count(), 2);
    assert.deepEqual(other.errors, []);
    return page;
  },

  async events({ context }) {
    const page = await open(context);
    const chunk = (delta, more = {}) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, ...more }] })}\n\n`;
    const reasons = chunk({ reasoning_content: "Let me think." });
    const usage = { prompt_tokens: 9, completion_tokens: 4 };
    const bodies = [
      `: ping\n\n${reasons}${chunk({ content: "Yes" }, { finish_reason: "stop" })}data: ${JSON.stringify({ choices: [], usage })}\n\ndata: [DONE]\n\n`,
      `${chunk({ content: "Half of" })}event: error\ndata: ${JSON.stringify({ error: { message: "the model failed" } })}\n\n`,
    ];
    page.changed = () => bodies.shift();
    await send(page, "Is it?");
    await ended(page);
    assert.equal(await page.innerText(".costs"), "pebble · 4 tokens · 0 of 9 prompt tokens cached");
    await page.click("text=Reasoning");
    assert.equal(await page.innerText(".reasoning div"), "Let me think.");
    await send(page, "And now?");
    await page.waitForSelector(".error:has-text('the model failed')");
    await reads(replies(page).last(), "Half of");
    page.changed = (body) => body;
    await page.evaluate(() => {
      IDBObjectStore.prototype.put = () => {
        throw new DOMException("full", "QuotaExceededError");
      };
    });
    await send(page, "What is 12 + 7?");
    await page.waitForSelector("text=The last change is not stored: the browser's space is used up.");
    await ended(page, 2);
    await reads(replies(page).last(), "19");
    return page;
  },

  async settings({ context }) {
    const page = await open(context);
    const bodies = makeLong(page, 5);
    await page.selectOption("header .model", "words");
    await page.click("[aria-label=Settings]");
    await page.fill("[name=system]", "Be brief.");
    await page.fill("[name=top_k]", "3");
    await page.fill("[name=seed]", "0");
    await page.check("[name=default]");
    await page.click("dialog >> text=Save");
    await send(page, "What is 12 + 7?");
    await ended(page);
    const [{ messages, model, top_k, seed, min_p }] = bodies;
    assert.deepEqual(messages[0], { role: "system", content: "Be brief." });
    assert.deepEqual([model, top_k, seed, min_p], ["words", 3, 0, undefined]);
    await page.reload();
    await ended(page);
    assert.equal(await page.inputValue("header .model"), "words");
    await page.click("text=New conversation");
    await page.click("[aria-label=Settings]");
    assert.equal(await page.inputValue("[name=top_k]"), "3");
    await page.fill("[name=top_p]", "7");
    await page.click("dialog >> text=Save");
    assert.equal(await page.locator("dialog").count(), 1); // 7 is out of range
    return page;
  },

  async key({ context }) {
    const page = await open(context, LOCKED);
    await page.fill("dialog input", "wrong");
    await page.click("text=Use this key");
    await page.waitForSelector("text=The server does not know this key.");
    await page.fill("dialog input", KEY);
    await page.click("text=Use this key");
    await page.waitForSelector("dialog", { state: "detached" });
    await send(page, "What is 12 + 7?");
    await ended(page);
    await page.reload();
    await ended(page);
    assert.equal(await page.locator("dialog").count(), 0);
    const other = await open(context, LOCKED);
    await other.waitForSelector("text=This server needs an API key.");
    page.errors = page.errors.filter((one) => !one.includes("401"));
    return page;
  },

  async hostile({ context }) {
    const page = await open(context);
    const made = conversation(2);
    made.messages[1].content = [
      "<img src=x onerror=alert(1)>", "![a](https://example.com/a.png)", "[b](javascript:alert(1))", "[c](data:text/html,x)",
      "[d](https://example.com)", "```html\n<script>alert(1)</script>\n```", "see https://example.com/raw now",
    ].join("\n\n");
    await load(page, [made]);
    await page.click("nav a");
    await ended(page);
    const found = await page.evaluate(() => ({
      elements: document.querySelectorAll(".markdown :is(img, script, iframe, [onerror])").length,
      links: [...document.querySelectorAll(".markdown a[href]")].map((one) => one.getAttribute("href")),
    }));
    assert.equal(found.elements, 0);
    assert.deepEqual(found.links, ["https://example.com/a.png", "https://example.com", "https://example.com/raw"]);
    assert.equal(await page.locator(".markdown .hljs-tag").count() > 0, true);
    return page;
  },

  async accessible({ browser }) {
    const axe = await readFile(new URL(import.meta.resolve("axe-core")), "utf8");
    let page;
    for (const colorScheme of ["light", "dark"]) {
      for (const width of [1280, 320]) {
        const context = await browser.newContext({ colorScheme, viewport: { width, height: 800 } });
        page = await open(context);
        const audit = async (state) => {
          await page.evaluate(axe);
          const { violations } = await page.evaluate(() => window.axe.run());
          const serious = violations.filter((one) => ["serious", "critical"].includes(one.impact));
          const named = serious.map((one) => `${one.id}: ${one.nodes.map((node) => node.html).join(" ")}`);
          assert.deepEqual(named, [], `${state}, ${colorScheme}, ${width} px`);
        };
        await audit("empty");
        if (width === 320) await page.click("header [aria-label=Conversations]");
        await load(page, [conversation(4)]);
        if (width === 320) await page.click("header [aria-label=Conversations]");
        await audit("list");
        await page.click("nav a");
        await ended(page, 2);
        await page.click(".message.user >> text=Edit");
        await audit("conversation");
        await page.click("[aria-label=Settings]");
        await audit("settings");
        await page.keyboard.press("Escape");
      }
    }
    return page;
  },
};

/** Write the pictures of the documentation: node drive.mjs pictures FOLDER. */
async function pictures(browser, folder) {
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ colorScheme, viewport: { width: 960, height: 860 } });
    const page = await open(context);
    const list = conversation(4, "list");
    const [first, answer, second, last] = list.messages;
    first.content = "How do I read a CSV file in Python?";
    answer.content =
      "Use the module `csv`:\n\n```python\nimport csv\n\nwith open('data.csv', newline='') as file:\n    for row in csv.DictReader(file):\n        print(row)  # a dictionary\n```\n\nThe first line of the file has the *names* of the columns.";
    second.content = "And as numbers?";
    last.content = "Convert each value with `float(row['price'])`.";
    last.model = answer.model = "";
    await load(page, [{ ...list, title: "CSV files in Python" }, { ...conversation(2, "b"), title: "A name for a boat", updated: 1 }]);
    await page.click("nav a");
    await ended(page, 2);
    await send(page, "What is 12 + 7?");
    await ended(page, 3);
    await page.screenshot({ path: join(folder, `chat-page-${colorScheme}.png`) });
  }
}

const names = process.argv[2] === "all" ? Object.keys(checks) : process.argv.slice(2);
const browser = await chromium.launch({ executablePath: BROWSER, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
let status = 0;
if (names[0] === "pictures") await pictures(browser, names.splice(0, 2)[1]);
for (const name of names) {
  const context = await browser.newContext();
  try {
    const page = await checks[name]({ browser, context });
    assert.deepEqual(page.errors, []);
    console.log(`${name}: passed`);
  } catch (error) {
    status = 1;
    console.error(`${name}: ${error.stack}`);
  }
  await context.close();
}
await browser.close();
process.exit(status);
