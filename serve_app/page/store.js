// What survives a reload, in this browser only: the settings and the chats. The API key is not among it (api.js).

const PREFIX = 'callboard-';
const MOST_CHATS = 100;

export const newId = () => crypto.randomUUID?.() ?? String(Math.random());

export function load(name, fallback) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback; // a browser that keeps nothing, or text that is not ours
  }
}

export function save(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or a browser that keeps nothing
  }
}

/**
 * All chats, the one last used first: `{ id, title, at, turns }`. `title` is a name that it was given, and `at` when it was
 * last asked. A turn is `{ question, images, text, reasoning, end, pace, request, calls, other }`: its
 * images are `{ id, name }` (picture_store.js has their data); its request has what the turns do
 * not tell, `{ model, system, fields, prefix }`, where `prefix` is the text that it went on from; `calls` are
 * `{ id, name, arguments, result }`, after whose results the next turn has no question; `other` is the answer beside it.
 */
export const chats = () => load('chats', []);

/** Puts a chat in front of the others; where there is no room, the oldest ones go. */
export function saveChat(chat) {
  let kept = [chat, ...chats().filter(({ id }) => id !== chat.id)].slice(0, MOST_CHATS);
  while (!save('chats', kept) && kept.length > 1) kept = kept.slice(0, -1);
}

export const renameChat = (id, title) => save('chats', chats().map(chat => (chat.id === id ? { ...chat, title } : chat)));

export const deleteChat = id => save('chats', chats().filter(chat => chat.id !== id));

export function forgetAll() {
  for (const key of Object.keys(localStorage)) if (key.startsWith(PREFIX)) localStorage.removeItem(key);
}
