// One answer of a chat on the page, as it comes and when it is there.

import { Pace } from './api.js';
import { copyButton, element, following } from './dom.js';
import { render } from './markdown.js';

/** Text that has come is drawn once a frame, however many tokens that is. */
export class Reply {
  failed = false;
  reason = null;
  #pace = new Pace();
  #frame = 0;

  /** `turn` holds the text that is there already, and gets what comes. */
  constructor(scroll, turn) {
    [this.scroll, this.turn] = [scroll, turn];
    this.body = element('div', { className: 'text' });
    this.thoughts = element('p');
    this.folded = element('details', { hidden: true }, element('summary', {}, 'Reasoning'), this.thoughts);
    this.foot = element('footer');
    this.element = element('div', { className: 'answer' }, this.folded, this.body, this.foot);
    this.#draw();
    this.finish(turn.end);
  }

  /** An answer is asked for: this one, or what goes on from it. */
  begin() {
    this.element.querySelector('.error')?.remove();
    this.foot.replaceChildren();
    this.element.ariaBusy = 'true';
    [this.failed, this.reason, this.#pace] = [false, null, new Pace()];
    this.#draw();
  }

  add(chunk) {
    this.#pace.see(chunk);
    const [choice] = chunk.choices;
    this.turn.text += choice?.delta.content ?? '';
    this.turn.reasoning += choice?.delta.reasoning_content ?? choice?.delta.reasoning ?? '';
    this.reason = choice?.finish_reason ?? this.reason;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** `end` says how it ended, if not by itself; `error` what went wrong. */
  finish(end, error) {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    [this.failed, this.turn.end] = [Boolean(error), end];
    const facts = [String(this.#pace), end].filter(Boolean).join(', ');
    following(this.scroll, () => {
      if (error) this.foot.before(element('p', { className: 'error', role: 'alert' }, error));
      this.foot.append(this.turn.text ? copyButton(() => this.turn.text) : '', element('span', {}, facts));
    });
    this.element.ariaBusy = 'false'; // a screen reader hears the answer once, whole
  }

  /** Shows the turn as it was. */
  restore(before) {
    Object.assign(this.turn, before);
    this.#draw();
  }

  #draw() {
    this.#frame = 0;
    following(this.scroll, () => {
      this.folded.hidden = !this.turn.reasoning;
      this.thoughts.textContent = this.turn.reasoning.trim();
      render(this.body, this.turn.text);
    });
  }
}
