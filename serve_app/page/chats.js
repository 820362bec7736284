// The list of the chats that this browser keeps.

import { element, quietButton } from './dom.js';
import { chats, deleteChat, forgetAll, load, save } from './store.js';

/** `open(chat)` shows a chat, `open()` a new one. */
export function startChats(open, resetSettings) {
  const list = document.getElementById('chats');
  const forget = document.getElementById('forget');
  let current;

  function show(chat) {
    current = chat;
    const kept = chats();
    list.replaceChildren(...kept.map(kept => {
      const [title] = kept.turns[0].question.trim().split('\n');
      const button = quietButton(title, () => open(kept));
      button.ariaCurrent = kept.id === chat.id;
      const remove = quietButton('×', () => {
        deleteChat(kept.id);
        kept.id === current.id ? open() : show(current);
      });
      remove.ariaLabel = remove.title = `Delete “${title}”`;
      return element('li', {}, button, remove);
    }));
    document.getElementById('no-chats').hidden = kept.length > 0;
  }

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
