// A button on each block of code that copies it. Of a session, only what was typed.
document.addEventListener('DOMContentLoaded', () => {
  if (!navigator.clipboard) return; // Only pages served over https have one.
  for (const block of document.querySelectorAll('div.highlight')) {
    const pre = block.querySelector('pre');
    if (!pre || block.closest('.output, .highlight-text')) continue;
    const button = document.createElement('button');
    button.className = 'copy';
    button.type = 'button';
    button.textContent = 'Copy';
    button.addEventListener('click', async () => {
      let text = pre.textContent;
      if (/^>>> /m.test(text)) {
        text = text
          .split('\n')
          .filter((line) => /^(>>>|\.\.\.)( |$)/.test(line))
          .map((line) => line.slice(4))
          .join('\n');
      }
      try {
        await navigator.clipboard.writeText(text.trimEnd() + '\n');
        button.textContent = 'Copied';
      } catch {
        button.textContent = 'Not copied';
      }
      setTimeout(() => (button.textContent = 'Copy'), 1500);
    });
    block.append(button);
  }
});
