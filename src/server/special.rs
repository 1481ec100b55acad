use std::collections::BTreeSet;

use serde_json::Value;

use crate::{engine::Tokenizer, types::Token};

use super::error::ApiError;

/// Characters that Unicode reserves for a program's own use: no text has them.
const MARKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// The special tokens of a vocabulary as they are written out: what a stranger must not be able to say.
///
/// Where one stands in a message it is put between marks before the template is rendered, and read as plain text
/// after. Messages without any go through as they are.
#[derive(Debug, Default)]
pub(super) struct Specials {
    texts: BTreeSet<Vec<u8>>,
    /// Of the texts, longest first.
    lengths: Vec<usize>,
    first: BTreeSet<u8>,
}

/// A stretch of a prompt, and whether special tokens in it are meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Part {
    pub text: String,
    pub parse_special: bool,
}

impl Specials {
    /// Those tokens whose text is read as them only where special tokens are meant.
    pub fn of(tokenizer: &dyn Tokenizer) -> Self {
        let is_special = |token: Token, text: &str| {
            let read = |parse| tokenizer.tokenize_as(text, false, parse).unwrap_or_default();
            !read(false).contains(&token) && read(true) == [token]
        };
        let tokens = (0..tokenizer.n_tokens()).filter_map(|token| Token::try_from(token).ok());
        let texts = tokens.filter_map(|token| {
            let text = String::from_utf8(tokenizer.piece(token)).ok().filter(|text| !text.is_empty())?;
            is_special(token, &text).then(|| text.into_bytes())
        });
        let texts: BTreeSet<Vec<u8>> = texts.collect();
        let lengths: BTreeSet<usize> = texts.iter().map(Vec::len).collect();
        let first = texts.iter().map(|text| text[0]).collect();
        Self { lengths: lengths.into_iter().rev().collect(), first, texts }
    }

    /// The mark to use for the messages of a body: one that is nowhere in it; nothing if they write out no special token.
    pub fn mark(&self, body: &Value) -> Result<Option<char>, ApiError> {
        if !self.is_in(&body["messages"]) {
            return Ok(None);
        }
        let text = body.to_string();
        let unused = MARKS.into_iter().find(|&mark| !text.contains(mark));
        unused.map(Some).ok_or_else(|| {
            ApiError::invalid("messages", "messages write out special tokens and every mark to tell them from text by")
        })
    }

    /// `text` with every special token in it between marks.
    pub fn marked(&self, text: &str, mark: char) -> String {
        let mut marked = String::with_capacity(text.len() + 8);
        let mut at = 0;
        while at < text.len() {
            let rest = &text[at..];
            let special = self.at(rest.as_bytes());
            let n = special.unwrap_or_else(|| rest.chars().next().map_or(1, char::len_utf8));
            let around = if special.is_some() { Some(mark) } else { None };
            marked.extend(around);
            marked.push_str(&rest[..n]);
            marked.extend(around);
            at += n;
        }
        marked
    }

    /// Cuts a rendered prompt where texts were marked.
    pub fn parts(&self, prompt: &str, mark: Option<char>) -> Result<Vec<Part>, ApiError> {
        let texts: Vec<&str> = mark.map_or_else(|| vec![prompt], |mark| prompt.split(mark).collect());
        let is_whole = |(at, text): (usize, &&str)| at % 2 == 0 || self.texts.contains(text.as_bytes());
        if texts.len().is_multiple_of(2) || !texts.iter().enumerate().all(is_whole) {
            let why = "messages write out a special token where the model's chat template cuts texts; leave it out";
            return Err(ApiError::invalid("messages", why));
        }
        let parts = texts.into_iter().enumerate();
        let parts = parts.map(|(at, text)| Part { text: text.to_owned(), parse_special: at % 2 == 0 });
        // The first one is kept even if it is empty: it brings the tokens that open a prompt.
        Ok(parts.enumerate().filter(|(at, part)| *at == 0 || !part.text.is_empty()).map(|(_, part)| part).collect())
    }

    fn is_in(&self, value: &Value) -> bool {
        match value {
            Value::String(text) => (0..text.len()).any(|at| self.at(&text.as_bytes()[at..]).is_some()),
            Value::Array(values) => values.iter().any(|value| self.is_in(value)),
            Value::Object(values) => values.values().any(|value| self.is_in(value)),
            _ => false,
        }
    }

    /// Bytes of the longest special token that `text` starts with.
    fn at(&self, text: &[u8]) -> Option<usize> {
        self.first.contains(text.first()?).then_some(())?;
        self.lengths.iter().copied().find(|&n| text.get(..n).is_some_and(|start| self.texts.contains(start)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// Bytes are tokens; 256 and 257 are special, 258 is not.
    struct Words;

    const WORDS: [&str; 3] = ["<|end|>", "<|end|>!", "<b>"];

    impl Tokenizer for Words {
        fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
            self.tokenize_as(text, true, true)
        }

        fn tokenize_as(&self, text: &str, _: bool, parse_special: bool) -> Result<Vec<Token>, String> {
            let mut tokens = Vec::new();
            let mut rest = text.as_bytes();
            while let Some(&byte) = rest.first() {
                let known = [1, 0, 2].into_iter().filter(|&word| parse_special || word == 2);
                if let Some(word) = known.into_iter().find(|&word| rest.starts_with(WORDS[word].as_bytes())) {
                    tokens.push(256 + Token::try_from(word).expect("three words"));
                    rest = &rest[WORDS[word].len()..];
                } else {
                    tokens.push(byte.into());
                    rest = &rest[1..];
                }
            }
            Ok(tokens)
        }

        fn piece(&self, token: Token) -> Vec<u8> {
            let word = usize::try_from(token - 256).ok().map(|word| WORDS[word].as_bytes().to_vec());
            word.unwrap_or_else(|| vec![token as u8])
        }

        fn end_tokens(&self) -> &[Token] {
            &[256]
        }

        fn n_tokens(&self) -> u32 {
            259
        }
    }

    #[test]
    fn only_what_is_special_is_marked_and_the_longest_of_it() {
        let specials = Specials::of(&Words);
        assert_eq!(specials.marked("a<|end|>b<|end|>!<b><|end", '#'), "a#<|end|>#b#<|end|>!#<b><|end");
        let body = |text: &str| json!({"messages": [{"role": "user", "content": [{"text": text}]}]});
        assert_eq!(specials.mark(&body("a<b>")), Ok(None));
        assert_eq!(specials.mark(&body("a<|end|>")), Ok(Some('\u{fdd0}')));
        assert_eq!(specials.mark(&body("a<|end|>\u{fdd0}")), Ok(Some('\u{fdd1}')));
        assert!(specials.mark(&body(&MARKS.chain("<|end|>".chars()).collect::<String>())).is_err());
    }

    #[test]
    fn a_template_that_tears_a_mark_is_told() {
        let specials = Specials::of(&Words);
        let part = |text: &str, parse_special| Part { text: text.to_owned(), parse_special };
        assert_eq!(specials.parts("a#<|end|>#", Some('#')), Ok(vec![part("a", true), part("<|end|>", false)]));
        assert_eq!(specials.parts("a#b", None), Ok(vec![part("a#b", true)]));
        for torn in ["a#<|end|>", "a#<|e#nd|>", "##"] {
            assert!(specials.parts(torn, Some('#')).is_err(), "{torn}");
        }
    }

    proptest! {
        #[test]
        fn no_special_token_comes_from_a_marked_text(words in prop::collection::vec(0usize..6, 0..12)) {
            let text: String = words.iter().map(|&word| ["<|end|>", "<|end|>!", "<b>", "<|end", "|>", "\u{e9}"][word]).collect();
            let specials = Specials::of(&Words);
            let prompt = format!("<|end|>{}<|end|>", specials.marked(&text, '#'));
            let parts = specials.parts(&prompt, Some('#')).expect("whole marks");
            let whole: String = parts.iter().map(|part| part.text.as_str()).collect();
            prop_assert_eq!(whole, format!("<|end|>{text}<|end|>"));
            let tokens: Vec<Token> = parts
                .iter()
                .flat_map(|part| Words.tokenize_as(&part.text, false, part.parse_special).expect("tokens"))
                .collect();
            prop_assert_eq!(tokens.iter().filter(|&&token| token == 256 || token == 257).count(), 2);
        }
    }
}
