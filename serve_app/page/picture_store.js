// The pictures of chats, in the browser's database: its other storage (store.js) has no room for them.

import { newId } from './store.js';

const TABLE = 'pictures';
const urls = new Map(); // data URLs by id, of pictures that this page has seen
let database;

/** The data URL of a picture `{ id, name }`; undefined before `loaded`, or if the browser has dropped it. */
export const urlOf = ({ id }) => urls.get(id);

/** The picture with this data URL; `keep` lets it survive a reload. */
export function pictureOf(url, name) {
  const id = newId();
  urls.set(id, url);
  return { id, name };
}

/** Resolves when the URLs of these pictures are there, as far as they are kept. */
export function loaded(pictures) {
  const missing = pictures.filter(picture => !urlOf(picture));
  return Promise.all(missing.map(async ({ id }) => {
    const url = await run('readonly', table => table.get(id));
    if (url) urls.set(id, url);
  }));
}

export function keep(pictures) {
  for (const picture of pictures) run('readwrite', table => table.put(urlOf(picture), picture.id));
}

/** Deletes all pictures but those of these chats. */
export async function dropUnused(chats) {
  const used = new Set(chats.flatMap(({ turns }) => turns).flatMap(({ images = [] }) => images).map(({ id }) => id));
  for (const id of (await run('readonly', table => table.getAllKeys())) ?? []) {
    if (!used.has(id)) run('readwrite', table => table.delete(id));
  }
}

/** The result of a request to the table; undefined in a browser that keeps nothing. */
async function run(mode, ask) {
  try {
    database ??= resultOf(Object.assign(indexedDB.open('callboard'), { onupgradeneeded: made => made.target.result.createObjectStore(TABLE) }));
    return await resultOf(ask((await database).transaction(TABLE, mode).objectStore(TABLE)));
  } catch {
    return undefined;
  }
}

const resultOf = asked => new Promise((resolve, reject) =>
  Object.assign(asked, { onsuccess: () => resolve(asked.result), onerror: () => reject(asked.error) }));
