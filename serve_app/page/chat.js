// A conversation: its turns, and the next answer as it comes.

import { ending, stream, streamed } from './api.js';
import { startChats } from './chats.js';
import { compare, showOther } from './compare.js';
import { Composer } from './composer.js';
import { element, quietButton } from './dom.js';
import { callsText, messagesOf } from './functions.js';
import { dropUnused, keep, loaded } from './picture_store.js';
import { Tray, contentOf, pictureList } from './pictures.js';
import { repeat } from './repeat.js';
import { Reply } from './reply.js';
import { buildSettings, drawnSeed, settings, showDefaults } from './settings.js';
import { startSnippets } from './snippets.js';
import { chats as kept, deleteChat, newId, saveChat } from './store.js';
import { checkStructure, fits } from './structure.js';

const PATH = 'v1/chat/completions';

export function startChat(served) {
  const panel = document.getElementById('chat');
  const [scroll, list] = [panel.querySelector('.scroll'), document.getElementById('turns')];
  const welcome = document.getElementById('welcome');
  const form = panel.querySelector('.settings form');
  const resetSettings = buildSettings(form, 'chat-settings', {});
  const composer = new Composer(panel.querySelector('.composer'), async (question, signal) => {
    await tray.added;
    await ask(question, shown.length, signal, tray.pictures);
  }, () => tray.pictures.length > 0);
  const tray = new Tray(served, () => picturesOf(shown.slice(0, numKept())).length);
  const attach = document.getElementById('attach');
  const chats = startChats(open, resetSettings);
  const isBusy = () => shown.at(-1)?.reply.element.ariaBusy === 'true';
  let chat; // { id, turns }, as it is stored
  let shown = []; // of each turn: { turn, element, reply }
  let compared; // the other answer that came last
  let seed = drawnSeed(); // of the next request, if the settings have none

  function open(opened) {
    interrupt();
    chat = opened ?? { id: newId(), turns: [] };
    shown = chat.turns.map(show);
    list.replaceChildren(...shown.map(({ element }) => element));
    chats.opened(chat);
    update();
    scroll.scrollTop = scroll.scrollHeight;
  }

  function show(turn) {
    const { question, images } = turn;
    const message = element('div', { className: 'message' },
      images ? pictureList(images) : '', question ? element('p', { className: 'question' }, question) : '');
    const asked = element('div', { className: 'asked' }, quietButton('Edit', () => edit(entry, asked)), message);
    const entry = { turn, reply: new Reply(scroll, turn) };
    entry.element = element('article', {}, question || images ? asked : '', entry.reply.element);
    showOther(entry.reply);
    return entry;
  }

  /** Sends `question` as the turn `at`; those that were there and behind it go. None goes on from the results of calls. */
  async function ask(question, at, signal, images = []) {
    for (const { element } of shown.splice(Math.min(at, numKept()))) element.remove();
    const entry = show({ question, ...(images.length && { images }), text: '', reasoning: '', end: '' });
    shown.push(entry);
    list.append(entry.element);
    if (question || images.length) {
      composer.box.value = '';
      keep(images);
      tray.show([]);
    }
    await answer(entry, signal);
  }

  /** Lets the model answer the last turn, or go on with the answer that it has. If nothing comes, `before` stays. */
  async function answer(entry, signal, before = {}) {
    const [conversation, { turn, reply }] = [chat, entry];
    turn.text = turn.text.trimEnd(); // templates cut it off, and models write it with the next word
    delete turn.request;
    conversation.at = Date.now();
    reply.begin();
    update();
    scroll.scrollTop = scroll.scrollHeight;
    try {
      const request = asked(turn.text);
      await Promise.all([checkStructure(request.fields, signal), loaded(picturesOf(shown))]);
      [turn.request, seed] = [request, drawnSeed()];
      for await (const chunk of stream(PATH, bodyOf(turn, shown.indexOf(entry)), signal)) reply.add(chunk);
      reply.finish(ending(reply.reason));
    } catch (error) {
      signal.aborted ? reply.finish('stopped') : reply.finish('', error.message);
    }
    if (chat !== conversation) return; // another chat was opened meanwhile
    if (reply.isEmpty) {
      reply.restore(before);
      showOther(reply);
    }
    if (hasFailed(entry)) {
      composer.box.value ||= turn.question;
      if (!tray.pictures.length) tray.show(turn.images ?? []);
    }
    update();
  }

  /** What a request has beside the turns, as things are now; `prefix` is the text that it goes on from. */
  const asked = prefix => ({
    model: served().id, system: document.getElementById('system').value.trim(), fields: { seed, ...settings(form) }, prefix,
  });

  /** The request of the turn `at`: each question before it whose answer came, that answer, and its own question. */
  function bodyOf({ question, images, request: { model, system, fields, prefix } }, at) {
    const messages = shown.slice(0, at).flatMap(({ turn }) => messagesOf(turn));
    if (question || images) messages.push({ role: 'user', content: contentOf({ question, images }) });
    if (system) messages.unshift({ role: 'system', content: system });
    const body = { model, messages, ...fields };
    if (!question && !images && body.tools) body.tool_choice = 'auto'; // else each result would demand another call
    if (!prefix) return body;
    messages.push({ role: 'assistant', content: prefix });
    return { ...body, continue_final_message: true, add_generation_prompt: false };
  }

  /** The request on screen: of what is written in the box, else of the last answer; null if there is neither. */
  function current() {
    const [last, question, images] = [shown.at(-1), composer.box.value, tray.pictures.length ? tray.pictures : undefined];
    if (question.trim() || images) return { path: PATH, body: streamed(bodyOf({ question, images, request: asked('') }, numKept())) };
    return last?.turn.request ? { path: PATH, body: streamed(bodyOf(last.turn, shown.length - 1)) } : null;
  }

  /** The number of turns before those at the end that failed, whose place the next one takes. */
  const numKept = () => shown.findLastIndex(entry => !hasFailed(entry)) + 1;

  /** Asks for an answer once more, and shows beneath it whether it is the same. */
  function again({ turn, reply }, at) {
    const { reasoning, text, calls, end, request: { prefix } } = turn;
    const kept = (prefix ? text.slice(prefix.length) : reasoning + text) + callsText(calls);
    const isWhole = end !== 'stopped' && end !== 'broken off';
    composer.run(signal => repeat(reply.note, bodyOf(turn, at), kept, isWhole, signal));
  }

  /** Answers the last question with the settings as they are now, beside the answer that it has. */
  function beside({ turn, reply }, at) {
    composer.run(async signal => {
      try {
        const now = asked('');
        if (!form.elements.seed.value) now.fields.seed = turn.request.fields.seed;
        await checkStructure(now.fields, signal);
        const conversation = chat;
        turn.other = { text: '', reasoning: '', end: '', request: now };
        if (matchMedia('(max-width: 100rem)').matches) form.closest('.panel').dispatchEvent(new Event('chosen')); // room for both
        compared = showOther(reply, true);
        await compare(compared, PATH, bodyOf({ ...turn, request: now }, at), signal);
        if (compared.isEmpty) delete turn.other;
        if (chat === conversation) update();
      } catch (error) {
        if (!signal.aborted) reply.note.textContent = error.message;
      }
    });
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
      const { images = [] } = entry.turn;
      if (text.trim() || images.length) composer.run(signal => ask(text, shown.indexOf(entry), signal, images));
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
    delete entry.turn.calls;
    composer.run(signal => answer(entry, signal, before));
  }

  /** Sends the results of the last turn's calls. */
  function goOn({ turn, reply }, results) {
    composer.run(signal => {
      turn.calls.forEach((call, at) => (call.result = results[at]));
      reply.showCalls();
      return ask('', shown.length, signal);
    });
  }

  /** An answer that is not whole yet ends here, and is kept as it is. */
  function interrupt() {
    const running = [shown.at(-1)?.reply, compared].filter(reply => reply?.element.ariaBusy === 'true');
    for (const reply of running) reply.interrupt();
    if (running.length) update();
    composer.stop();
  }

  /** Keeps the chat, and brings what depends on its turns up to date. */
  function update() {
    chat.turns = shown.filter(entry => !hasFailed(entry)).map(({ turn }) => turn);
    chat.turns.length ? saveChat(chat) : deleteChat(chat.id);
    chats.show(chat);
    welcome.hidden = shown.length > 0;
    panel.querySelectorAll('.again').forEach(button => button.remove());
    if (isBusy()) return;
    const last = numKept() - 1;
    shown.forEach((entry, at) => {
      const { turn, reply } = entry;
      if (hasFailed(entry)) return;
      const hasAnswer = !reply.isEmpty && turn.request;
      if (turn.calls) reply.showCalls(at === last ? results => goOn(entry, results) : undefined);
      const facts = reply.foot.lastChild;
      const add = (label, title, onClick) =>
        facts.before(Object.assign(quietButton(label, onClick), { className: 'quiet again', title }));
      if (hasAnswer) add('Again', 'Sends the same request, and compares the answers', () => again(entry, at));
      if (at < shown.length - 1) return;
      if (hasAnswer) {
        add('Compare', 'Answers with the settings as they are now, beside this answer', () => beside(entry, at));
      }
      add('Regenerate', 'Asks for another answer', () => regenerate(entry));
      if (turn.text && !turn.calls && turn.end && !fits(turn.request?.fields)) {
        add('Continue', 'Lets the model go on', () => composer.run(signal => answer(entry, signal)));
      }
    });
  }

  for (const button of panel.querySelectorAll('.new-chat')) {
    button.addEventListener('click', () => {
      open();
      button.dispatchEvent(new Event('chosen', { bubbles: true }));
      composer.box.focus();
    });
  }
  startSnippets(panel.querySelector('.menu'), current);
  addEventListener('process-killed', ({ detail }) => isBusy() && shown.at(-1).reply.witness(detail));
  addEventListener('model-known', () => {
    showDefaults(form, served().sampling);
    attach.hidden = !tray.takesImages;
  });
  panel.querySelector('.composer').before(tray.element);
  tray.listen(composer.box, panel.querySelector('.stage'), attach.querySelector('input'));
  dropUnused(kept());
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

const picturesOf = shown => shown.flatMap(({ turn }) => turn.images ?? []);

const hasFailed = entry => Boolean(entry?.reply.failed && entry.reply.isEmpty);
