// The theme: light, dark, or that of the system. Colours in style.css follow the property color-scheme.

const THEME = "genai-theme";

export const getTheme = () => localStorage.getItem(THEME) ?? "light dark";

/** Use a theme, now and in the future: "light", "dark" or "light dark". */
export function chooseTheme(theme) {
  localStorage.setItem(THEME, theme);
  applyTheme();
}

export function applyTheme() {
  document.documentElement.style.colorScheme = getTheme();
}
