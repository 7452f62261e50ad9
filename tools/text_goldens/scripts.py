"""Texts in many scripts, and other texts that are difficult to tokenise, for the publishers' own tokenizer formats."""

from __future__ import annotations

SCRIPTS = {
    "latin": "Žluťoučký kůň, naïve façade: Ærø's Straße isn't ﬁne.",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα, ΣΊΣΥΦΟΣ.",
    "cyrillic": "Съешь ещё этих мягких Булок, їжак!",
    "armenian": "Բոլոր մարդիկ ծնվում են ազատ։",
    "georgian": "ყველა ადამიანი იბადება ᲗᲐᲕᲘᲡᲣᲤᲐᲚᲘ.",
    "hebrew": "כׇּל בְּנֵי הָאָדָם נוֹלְדוּ",
    "arabic": "يولَد جميعُ الناس أحرارًا ١٢٣",
    "devanagari": "सभी मनुष्यों को गौरव १२३ है।",
    "bengali": "সমস্ত মানুষ স্বাধীনভাবে ৪৫",
    "tamil": "மனிதப் பிறவியினர் சகலரும்",
    "telugu": "ప్రతిపత్తిస్వత్వముల విషయమున",
    "thai": "มนุษย์ทั้งหลายเกิดมา ๑๒",
    "lao": "ມະນຸດເກີດມາມີສິດເສລີພາບ",
    "tibetan": "འགྲོ་བ་མིའི་རིགས་རྒྱུད་",
    "burmese": "လူတိုင်းသည် တူညီလွတ်လပ်သော",
    "khmer": "មនុស្សទាំងអស់ កើតមក",
    "ethiopic": "የሰው ልጅ ሁሉ ሲወለድ ነጻ፣",
    "hangul": "모든 인간은 태어날 때부터 \u1112\u1161\u11ab",
    "kana": "すべてのニンゲンは、ﾊﾝｶｸ。",
    "han": "人人生而自由,在尊严上一律平等。𠮷野家",
    "cherokee": "ᏂᎦᏓ ᎠᏂᏴᏫ ꮑꭶ",
    "mongolian": "ᠬᠦᠮᠦᠨ ᠪᠦᠷ",
}
"""Texts by script: beginnings of the Universal Declaration of Human Rights, and sentences with all letters."""

ODDITIES = (
    "",
    " ",
    "     ",
    "\n",
    "\t\t x",
    "a  b   c    d",
    "end of text \n  ",
    "one\r\ntwo\rthree\n\n\nfour   \n\n  five",
    " \u00a0\u2003\u3000wide\u200b\u2028line",
    "0 12 345 6789 3.14159 1,000,000 ½ ² ① Ⅻ",
    "don't DON'T we'll I'VE 'tis 'S ’s I'ſ",
    "👩‍👩‍👧‍👦👍🏽🏳️‍🌈🇩🇪1️⃣ 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "e\u0301 \u00e9 A\u030a \u212b Z͑ͫ̓ͪ̂̚algo",
    "\x01\x02\x1b[31m\x7f\x85\u202eabc\u202c\ufeff",
    "𝕬𝖇𝖈 𐍈𐌰 𓀀 ﷽ \ufffd",
    "def f(x):\n\tif x>=1:\n\t\treturn {'a':[x**2]}//\n",
    "CamelCaseWord snake_case XMLHttp iPhoneX ǅungla",
    "https://example.org/a_b-c?d=%20e&f#g",
    "!!!??... --- ***/// \\\\ $$ ^^",
    "w" + "oo" * 60 + "rd",
    "Donaudampfschifffahrtsgesellschaft" * 3,
    "的" * 20 + "了" * 5,
    "▁ Ġ ## <0x41> ▁the",
)
SOURCE_TEXTS = (*SCRIPTS.values(), *ODDITIES)
CORPUS = (*SCRIPTS.values(), *ODDITIES[5:]) * 2 + (
    "the cat sat on the mat and the dog ran over there; the end of the story is near",
    "I am walking, talking and singing while counting 1 2 3 4 5 6 7 8 9 10. Hello there!",
) * 3
