"""Fifty short prompts of several kinds; the requested text may be part of the prompt or not."""

CODE = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\nprint(add(3, 4))\nprint(add(5, 6))"
POEM = "The rain came down, the rain went by,\nthe rain came down and so did I."
ROWS = '[{"id": 1, "name": "Ann"}, {"id": 2, "name": "Bob"}, {"id": 3, "name": "Cid"}]'
LETTER = "Dear Sir, your parcel has arrived at the station. Please bring this letter and your passport."

CODE_TO_REPEAT = (
    f"Copy this code:\n{CODE}",
    f"Rename add to plus in this code:\n{CODE}",
    f"Add a comment to this code:\n{CODE}",
    "Copy: for i in range(10): print(i)",
    "Repeat this SQL: SELECT name FROM people WHERE age > 30 ORDER BY name;",
    "Write this in capitals: const x = 1; const y = 2;",
    f"What does this code print?\n{CODE}",
)
QUOTING = (
    f"Copy this text:\n\n{LETTER}",
    f"Quote the first sentence: {LETTER}",
    f"Copy this poem:\n{POEM}",
    f"Correct the spelling: {LETTER.replace('arrived', 'arived')}",
    f"Say it politely: {LETTER}",
    f"Write the poem twice:\n{POEM}",
    "Repeat after me: she sells sea shells by the sea shore.",
)
LISTS = (
    "Count from 1 to 20.",
    "List the days of the week.",
    "List the months of the year, one a line.",
    "Write the alphabet with a dash between the letters.",
    "Name five fruits as a numbered list.",
    "Write the even numbers up to 30, separated by commas.",
    "List: red, green, blue. Now list them backwards.",
)
CHAT = (
    "Hello!",
    "Why is the sky blue?",
    "Tell me a joke about a penguin.",
    "What is the capital of Australia?",
    "How do I boil an egg?",
    "Write a haiku about autumn.",
    "Who was Marie Curie?",
    "What should I cook today?",
)
JSON = (
    f"Copy this JSON: {ROWS}",
    f"Sort these by name: {ROWS}",
    'Write a JSON object with "name" and "age".',
    "Write a JSON list of the numbers 1 to 10.",
    f"Add an entry to this JSON: {ROWS}",
    '{"a": 1, "b": 2, "c": 3} and the same once more:',
)
LANGUAGES = (
    "Zähle auf Deutsch von eins bis zehn.",
    "Dis bonjour en français, trois fois.",
    "Escribe una frase sobre el mar.",
    "Translate into German: the house is red, the door is blue.",
    "Переведи на русский: good morning",
    "用中文写一句话。",
    "日本語で「ありがとう」と三回書いてください。",
)
ARITHMETIC = (
    "What is 17 times 23?",
    "1+1=2, 2+2=4, 3+3=6, 4+4=",
    "Write the multiplication table of 3.",
    "Solve 2x + 3 = 11 step by step.",
)
REPEATED = (
    "word word word word word word word word",
    "Write the same word again and again.",
    "Say ha ten times.",
    "a b a b a b a b a b a b",
)
PROMPTS = (*CODE_TO_REPEAT, *QUOTING, *LISTS, *CHAT, *JSON, *LANGUAGES, *ARITHMETIC, *REPEATED)
