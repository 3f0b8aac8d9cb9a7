// Rules that find bugs. How the code looks is left to its authors.

// What the modules use of the browser: a name that is not here is a mistake.
const BROWSER =
  "Blob DecompressionStream IntersectionObserver Response cancelAnimationFrame clearInterval document " +
  "getComputedStyle localStorage matchMedia requestAnimationFrame setInterval atob window self performance URL Worker";
// What their tests use of Node.js.
const NODE = "URL process globalThis Buffer console";

const RULES =
  // names
  "no-undef no-redeclare no-shadow-restricted-names no-unused-vars no-var prefer-const no-const-assign " +
  "no-class-assign no-func-assign no-import-assign no-ex-assign no-global-assign no-self-assign " +
  "no-useless-assignment no-unmodified-loop-condition " +
  // comparisons and conditions
  "eqeqeq use-isnan valid-typeof no-compare-neg-zero no-self-compare no-cond-assign " +
  "no-constant-condition no-constant-binary-expression no-dupe-else-if no-unsafe-negation " +
  "no-unsafe-optional-chaining " +
  // the same thing twice
  "no-dupe-args no-dupe-class-members no-dupe-keys no-duplicate-case " +
  // code that never runs or does nothing
  "no-unreachable no-unreachable-loop no-unused-expressions no-unused-labels no-useless-catch no-empty " +
  "no-empty-pattern no-fallthrough no-debugger for-direction getter-return array-callback-return " +
  "no-setter-return no-unsafe-finally no-sparse-arrays no-loss-of-precision " +
  // classes and promises
  "constructor-super no-this-before-super no-async-promise-executor no-promise-executor-return " +
  "no-invalid-this require-await " +
  // text that becomes code
  "no-eval no-implied-eval no-new-func no-script-url no-invalid-regexp no-misleading-character-class " +
  "no-template-curly-in-string";

const allowed = (names) => Object.fromEntries(names.split(" ").map((name) => [name, "readonly"]));

export default [
  {
    languageOptions: { ecmaVersion: 2022, sourceType: "module", globals: allowed(BROWSER) },
    linterOptions: { reportUnusedDisableDirectives: "error" },
    rules: {
      ...Object.fromEntries(RULES.split(" ").map((name) => [name, "error"])),
      // A function may call one that stands further down; a line may not read a name that has no value yet.
      "no-use-before-define": ["error", { functions: false, classes: false, variables: false }],
    },
  },
  { files: ["tests/**", "**/check.mjs"], languageOptions: { globals: allowed(NODE) } },
];
