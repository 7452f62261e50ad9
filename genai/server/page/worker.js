// A service worker, so that the page also loads while the server is down. It asks the server first, so that the page is
// always as new as the server. Requests to the API pass unchanged.

const CACHE = "genai-page";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

const root = new URL("../", self.location).pathname;

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const { origin, pathname } = new URL(request.url);
  const isPage = pathname === root || pathname.startsWith(`${root}page/`);
  if (request.method === "GET" && origin === self.location.origin && isPage) event.respondWith(answer(request));
});

async function answer(request) {
  const cache = await caches.open(CACHE);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(request, response.clone());
    return response;
  } catch (error) {
    const stored = await cache.match(request, { ignoreSearch: true });
    if (stored) return stored;
    throw error;
  }
}
