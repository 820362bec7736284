// The list of the chats that this browser keeps.

import { element, quietButton } from './dom.js';
import { chats, deleteChat, forgetAll, load, renameChat, save, saveChat } from './store.js';
import { asJson, asMarkdown, download, imported } from './transfer.js';

/** `open(chat)` shows a chat, `open()` a new one. */
export function startChats(open, resetSettings) {
  const [list, search] = [document.getElementById('chats'), document.getElementById('search')];
  const [forget, note] = [document.getElementById('forget'), document.getElementById('chats-note')];
  const [json, markdown] = [document.getElementById('export-json'), document.getElementById('export-markdown')];
  const chosen = () => document.getElementById('chats-panel').dispatchEvent(new Event('chosen'));
  let current;

  function show(chat) {
    current = chat;
    const kept = chats();
    const wanted = search.value.trim().toLowerCase();
    list.replaceChildren(...kept.filter(each => textOf(each).includes(wanted)).map(item));
    search.hidden = kept.length < 2 && !wanted;
    document.getElementById('no-chats').hidden = kept.length > 0;
    json.hidden = kept.length === 0;
    markdown.hidden = chat.turns.length === 0;
    note.textContent = '';
  }

  function item(kept) {
    const title = titleOf(kept);
    const button = quietButton('', () => {
      open(kept);
      chosen();
    });
    button.append(element('span', { className: 'title' }, title), kept.at ? element('time', {}, dateOf(kept.at)) : '');
    button.ariaCurrent = kept.id === current.id;
    button.title = title;
    const rename = quietButton('✎', () => row.replaceChildren(field) || field.select());
    const remove = quietButton('×', () => {
      deleteChat(kept.id);
      kept.id === current.id ? open() : show(current);
    });
    rename.ariaLabel = rename.title = `Rename “${title}”`;
    remove.ariaLabel = remove.title = `Delete “${title}”`;
    const field = element('input', { value: title, ariaLabel: 'Name of the chat', maxLength: 200 });
    field.addEventListener('keydown', event => {
      if (event.key === 'Escape') field.value = title;
      if (event.key !== 'Escape' && event.key !== 'Enter') return;
      event.stopPropagation();
      field.blur();
    });
    field.addEventListener('blur', () => {
      const named = field.value.trim() || undefined; // an empty name gives the first question again
      if (named !== title) renameChat(kept.id, named);
      if (named !== title && kept.id === current.id) current.title = named;
      show(current);
    });
    const row = element('li', {}, button, rename, remove);
    return row;
  }

  search.addEventListener('input', () => show(current));
  const day = () => new Date().toISOString().slice(0, 10);
  json.addEventListener('click', async () => download(`chats-${day()}.json`, 'application/json', await asJson(chats())));
  markdown.addEventListener('click', async () => download(`chat-${day()}.md`, 'text/markdown', await asMarkdown(current)));
  document.getElementById('import').addEventListener('change', async ({ target }) => {
    const [file] = target.files;
    if (!file) return;
    try {
      const added = imported(await file.text());
      for (const chat of added.toReversed()) saveChat(chat);
      open(added[0]);
      note.className = '';
      note.textContent = `${added.length} chat${added.length > 1 ? 's' : ''} imported.`;
    } catch (error) {
      [note.className, note.textContent] = ['error', error.message];
    }
    target.value = '';
  });
  forget.addEventListener('click', () => {
    if (!confirm('Delete all chats and settings that this browser keeps for this page?')) return;
    forgetAll();
    resetSettings();
    open();
  });
  return {
    show, // the list, with `chat` as the one that is open
    opened: chat => save('open-chat', chat.id),
    last: () => chats().find(({ id }) => id === load('open-chat')),
  };
}

const titleOf = ({ title, turns }) => title || turns[0].question.trim().split('\n')[0] || 'Picture';
const textOf = chat => [titleOf(chat), ...chat.turns.flatMap(({ question, text }) => [question, text])].join('\n').toLowerCase();

function dateOf(at) {
  const [date, isToday] = [new Date(at), new Date(at).toDateString() === new Date().toDateString()];
  return isToday ? date.toLocaleTimeString([], { timeStyle: 'short' }) : date.toLocaleDateString([], { dateStyle: 'medium' });
}
