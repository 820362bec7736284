// The list of the chats that this browser keeps.

import { element, quietButton } from './dom.js';
import { chats, deleteChat, forgetAll, load, save, saveChat } from './store.js';
import { asJson, asMarkdown, download, imported } from './transfer.js';

/** `open(chat)` shows a chat, `open()` a new one. */
export function startChats(open, resetSettings) {
  const list = document.getElementById('chats');
  const [forget, note] = [document.getElementById('forget'), document.getElementById('chats-note')];
  const [json, markdown] = [document.getElementById('export-json'), document.getElementById('export-markdown')];
  const chosen = () => document.getElementById('chats-panel').dispatchEvent(new Event('chosen'));
  let current;

  function show(chat) {
    current = chat;
    const kept = chats();
    list.replaceChildren(...kept.map(kept => {
      const [title] = kept.turns[0].question.trim().split('\n');
      const button = quietButton(title, () => {
        open(kept);
        chosen();
      });
      button.ariaCurrent = kept.id === chat.id;
      const remove = quietButton('×', () => {
        deleteChat(kept.id);
        kept.id === current.id ? open() : show(current);
      });
      remove.ariaLabel = remove.title = `Delete “${title}”`;
      return element('li', {}, button, remove);
    }));
    document.getElementById('no-chats').hidden = kept.length > 0;
    json.hidden = kept.length === 0;
    markdown.hidden = chat.turns.length === 0;
    note.textContent = '';
  }

  const day = () => new Date().toISOString().slice(0, 10);
  json.addEventListener('click', () => download(`chats-${day()}.json`, 'application/json', asJson(chats())));
  markdown.addEventListener('click', () => download(`chat-${day()}.md`, 'text/markdown', asMarkdown(current)));
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
