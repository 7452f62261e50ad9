// The texts of replies while they are received. A listener gets each text once per frame of the screen at most.

const texts = new Map();
const listeners = new Map();

/** Return the text of a reply so far: {content, reasoning}. */
export function liveText(id) {
  return texts.get(id);
}

/** Set the text of a reply, and inform its listener. */
export function setLive(id, text) {
  texts.set(id, text);
  const listener = listeners.get(id);
  if (listener && !listener.isAsked) {
    listener.isAsked = true;
    requestFrame(() => {
      listener.isAsked = false;
      if (texts.has(id)) listener.call(texts.get(id));
    });
  }
}

// A tab in the background gets no frames, and its text would be missing until then.
function requestFrame(call) {
  if (document.hidden) setTimeout(call, 200);
  else requestAnimationFrame(call);
}

export function removeLive(id) {
  texts.delete(id);
}

/** Call a function with the text of a reply when the text has changed. Return the function that ends this. */
export function listen(id, call) {
  const listener = { call, isAsked: false };
  listeners.set(id, listener);
  if (texts.has(id)) call(texts.get(id));
  return () => {
    if (listeners.get(id) === listener) listeners.delete(id);
  };
}
