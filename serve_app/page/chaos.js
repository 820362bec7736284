// "Kill an engine": where the server allows it, anyone can watch an answer pause and go on.

import { request } from './api.js';

export function startChaos(served) {
  const [box, note] = [document.getElementById('chaos'), document.getElementById('killed')];
  const buttons = document.querySelectorAll('.kill');

  async function kill(role) {
    note.className = '';
    try {
      const { engine, pid } = await (await request(`chaos?role=${role}`, { method: 'POST' })).json();
      note.textContent = `Killed ${role === 'engine' ? `engine ${engine}` : `a runner of engine ${engine}`}, process ${pid}.`;
      dispatchEvent(new CustomEvent('process-killed', { detail: { role } }));
    } catch (error) {
      [note.textContent, note.className] = [error.message, 'error'];
      dispatchEvent(new CustomEvent('process-killed', { detail: { problem: error.message } }));
    }
  }

  for (const button of buttons) {
    button.addEventListener('click', async () => {
      button.disabled = true;
      await kill(button.dataset.role);
      button.disabled = false;
    });
  }
  addEventListener('model-known', () => {
    box.hidden = !served().allow_chaos;
    for (const button of buttons) button.hidden = !served().allow_chaos;
  });
}
