// A conversation: its turns, and the next answer as it comes.

import { stream } from './api.js';
import { startChats } from './chats.js';
import { Composer } from './composer.js';
import { element, quietButton } from './dom.js';
import { Reply } from './reply.js';
import { buildSettings, settings } from './settings.js';
import { deleteChat, saveChat } from './store.js';

const SETTINGS = { temperature: '0.7' };

export function startChat(served) {
  const panel = document.getElementById('chat');
  const [scroll, list] = [panel.querySelector('.scroll'), document.getElementById('turns')];
  const [welcome, newChat] = [document.getElementById('welcome'), document.getElementById('new-chat')];
  const form = panel.querySelector('.settings form');
  const resetSettings = buildSettings(form, 'chat-settings', SETTINGS);
  const composer = new Composer(panel.querySelector('.composer'), (question, signal) => ask(question, shown.length, signal));
  const chats = startChats(open, resetSettings);
  const isBusy = () => shown.at(-1)?.reply.element.ariaBusy === 'true';
  let chat; // { id, turns }, as it is stored
  let shown = []; // of each turn: { turn, element, reply }

  function open(opened) {
    interrupt();
    chat = opened ?? { id: crypto.randomUUID?.() ?? String(Math.random()), turns: [] };
    shown = chat.turns.map(show);
    list.replaceChildren(...shown.map(({ element }) => element));
    chats.opened(chat);
    update();
    scroll.scrollTop = scroll.scrollHeight;
  }

  function show(turn) {
    const question = element('p', { className: 'question' }, turn.question);
    const asked = element('div', { className: 'asked' }, quietButton('Edit', () => edit(entry, asked)), question);
    const entry = { turn, reply: new Reply(scroll, turn) };
    entry.element = element('article', {}, asked, entry.reply.element);
    return entry;
  }

  /** Sends `question` as the turn `at`; those that were there and behind it go. */
  async function ask(question, at, signal) {
    while (hasFailed(shown.at(-1))) shown.pop().element.remove(); // the new one takes its place
    for (const { element } of shown.splice(at)) element.remove();
    const entry = show({ question, text: '', reasoning: '', end: '' });
    shown.push(entry);
    list.append(entry.element);
    composer.box.value = '';
    await answer(entry, signal);
  }

  /** Lets the model answer the last turn, or go on with the answer that it has. If nothing comes, `before` stays. */
  async function answer({ turn, reply }, signal, before = {}) {
    const conversation = chat;
    const goesOn = Boolean(turn.text);
    turn.text = turn.text.trimEnd(); // templates cut it off, and models write it with the next word
    reply.begin();
    update();
    scroll.scrollTop = scroll.scrollHeight;
    try {
      const body = { model: served().id, messages: messages(), ...settings(form) };
      if (goesOn) Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
      for await (const chunk of stream('v1/chat/completions', body, signal)) reply.add(chunk);
      reply.finish(reply.reason === 'length' ? 'cut at the token limit' : '');
    } catch (error) {
      signal.aborted ? reply.finish('stopped') : reply.finish('', error.message);
    }
    if (chat !== conversation) return; // another chat was opened meanwhile
    if (!turn.text) reply.restore(before);
    if (reply.failed && !turn.text) composer.box.value ||= turn.question;
    update();
  }

  /** What the model is told: each question whose answer came, that answer, and the last question with what it has. */
  function messages() {
    const system = document.getElementById('system').value.trim();
    const said = shown.flatMap(({ turn: { question, text } }, at) => {
      const asked = { role: 'user', content: question };
      if (text) return [asked, { role: 'assistant', content: text }];
      return at === shown.length - 1 ? [asked] : [];
    });
    return system ? [{ role: 'system', content: system }, ...said] : said;
  }

  function edit(entry, asked) {
    const box = element('textarea', { value: entry.turn.question, ariaLabel: 'Your message' });
    const close = () => editor.replaceWith(asked);
    const editor = element('form', { className: 'editor' }, box, element('div', {},
      element('span', { className: 'hint' }, 'What follows is replaced.'), quietButton('Cancel', close),
      element('button', { className: 'primary' }, 'Send')));
    editor.addEventListener('submit', event => {
      event.preventDefault();
      const text = box.value;
      if (text.trim()) composer.run(signal => ask(text, shown.indexOf(entry), signal));
    });
    box.addEventListener('keydown', event => {
      if (event.key === 'Escape') close();
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      editor.requestSubmit();
    });
    asked.replaceWith(editor);
    box.focus();
  }

  function regenerate(entry) {
    const before = { ...entry.turn };
    Object.assign(entry.turn, { text: '', reasoning: '' });
    composer.run(signal => answer(entry, signal, before));
  }

  /** An answer that is not whole yet ends here, and is kept as it is. */
  function interrupt() {
    if (isBusy()) {
      shown.at(-1).turn.end = 'stopped';
      update();
    }
    composer.stop();
  }

  /** Keeps the chat, and brings what depends on its turns up to date. */
  function update() {
    chat.turns = shown.filter(entry => !hasFailed(entry)).map(({ turn }) => turn);
    chat.turns.length ? saveChat(chat) : deleteChat(chat.id);
    chats.show(chat);
    welcome.hidden = shown.length > 0;
    newChat.hidden = shown.length === 0;
    panel.querySelectorAll('.again').forEach(button => button.remove());
    const last = shown.at(-1);
    if (!last || isBusy() || hasFailed(last)) return;
    const again = (label, onClick) => Object.assign(quietButton(label, onClick), { className: 'quiet again' });
    const facts = last.reply.foot.lastChild;
    facts.before(again('Regenerate', () => regenerate(last)));
    if (last.turn.text && last.turn.end) facts.before(again('Continue', () => composer.run(signal => answer(last, signal))));
  }

  newChat.addEventListener('click', () => {
    open();
    composer.box.focus();
  });
  for (const suggestion of welcome.querySelectorAll('button')) {
    suggestion.addEventListener('click', () => {
      composer.box.value = suggestion.textContent;
      composer.box.focus();
      composer.form.requestSubmit();
    });
  }
  addEventListener('pagehide', interrupt);
  open(chats.last());
}

const hasFailed = entry => Boolean(entry?.reply.failed && !entry.turn.text);
