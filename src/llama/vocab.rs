//! Text to tokens and back, and chat messages to a prompt, with the model's own vocabulary and template.
//!
//! Never decides what a request means: special tokens are parsed only when asked for.

use std::{ffi::CString, ptr};

use llama_cpp_sys_2 as sys;

use crate::types::Token;

use super::{error::LlamaError, guard, model::Model};

/// Texts longer than this are tokenised on a thread with a stack of their own size: some of llama.cpp's splitters
/// recurse once a character.
const RECURSION_SAFE: usize = 16 * 1024;
const STACK_PER_BYTE: usize = 1024;

impl Model {
    /// The tokens of `text`, which may be empty, hold NUL bytes, and be of any length below 2 GiB.
    ///
    /// `add_special` puts the model's first and last tokens around it, if it has them; `parse_special` reads special
    /// tokens written out in the text as such (never do that with text of strangers).
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, LlamaError> {
        if text.len() <= RECURSION_SAFE {
            return self.tokenize_here(text, add_special, parse_special);
        }
        let failed = |reason: String| LlamaError::Vocab { what: "the text", reason };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("eldr-tokenize".to_owned())
                .stack_size(text.len().saturating_mul(STACK_PER_BYTE).min(4 << 30))
                .spawn_scoped(scope, || self.tokenize_here(text, add_special, parse_special))
                .map_err(|e| failed(format!("no thread for a text of {} bytes: {e}", text.len())))?
                .join()
                .unwrap_or_else(|_| Err(failed("the tokeniser panicked".to_owned())))
        })
    }

    fn tokenize_here(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, LlamaError> {
        let failed = |reason: String| LlamaError::Vocab { what: "the text", reason };
        let text_len = i32::try_from(text.len()).map_err(|_| failed(format!("{} bytes is too long", text.len())))?;
        // A token is at least a byte, plus the special ones; a second call follows when that was not enough.
        let mut tokens: Vec<Token> = vec![0; text.len() / 2 + 8];
        loop {
            let capacity = i32::try_from(tokens.len()).map_err(|_| failed("too many tokens".to_owned()))?;
            let mut result = 0;
            // SAFETY: the vocabulary lives as long as the model; lengths are those of the slices.
            guard::call(|message, size| unsafe {
                guard::eldr_guard_tokenize(
                    self.vocab(),
                    text.as_ptr().cast(),
                    text_len,
                    tokens.as_mut_ptr(),
                    capacity,
                    add_special,
                    parse_special,
                    &raw mut result,
                    message,
                    size,
                )
            })
            .map_err(|e| failed(e.to_string()))?;
            match usize::try_from(result) {
                Ok(n) => {
                    tokens.truncate(n);
                    return Ok(tokens);
                }
                Err(_) if result == i32::MIN => return Err(failed("too many tokens".to_owned())),
                Err(_) if result.unsigned_abs() as usize > tokens.len() => {
                    tokens.resize(result.unsigned_abs() as usize, 0);
                }
                Err(_) => return Err(failed(format!("llama_tokenize returned {result}"))),
            }
        }
    }

    /// The bytes a token stands for, special tokens written out. One character may be spread over several tokens, so
    /// a piece alone need not be UTF-8.
    pub fn piece(&self, token: Token) -> Result<Vec<u8>, LlamaError> {
        self.check_token(token)?;
        let failed = |reason: String| LlamaError::Vocab { what: "a token", reason };
        let mut bytes = vec![0u8; 64];
        loop {
            let capacity = i32::try_from(bytes.len()).map_err(|_| failed("its text is too long".to_owned()))?;
            let mut result = 0;
            // SAFETY: the token is in the vocabulary, which lives as long as the model; the length is the buffer's.
            guard::call(|message, size| unsafe {
                guard::eldr_guard_piece(
                    self.vocab(),
                    token,
                    bytes.as_mut_ptr().cast(),
                    capacity,
                    true,
                    &raw mut result,
                    message,
                    size,
                )
            })
            .map_err(|e| failed(e.to_string()))?;
            if let Ok(n) = usize::try_from(result) {
                bytes.truncate(n);
                return Ok(bytes);
            }
            let need = result.unsigned_abs() as usize;
            if need <= bytes.len() {
                return Err(failed(format!("llama_token_to_piece returned {result}")));
            }
            bytes.resize(need, 0);
        }
    }

    /// The text of `tokens`; bytes that are not UTF-8 become replacement characters.
    pub fn text(&self, tokens: &[Token]) -> Result<String, LlamaError> {
        let mut bytes = Vec::new();
        for &token in tokens {
            bytes.extend(self.piece(token)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The token ends a generation.
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: the vocabulary lives as long as the model; a token outside it is looked up and not found.
        self.check_token(token).is_ok() && unsafe { sys::llama_vocab_is_eog(self.vocab(), token) }
    }

    /// Tokens of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.facts().n_vocab as usize
    }

    /// The token in front of every text, if the vocabulary has one.
    pub fn bos(&self) -> Option<Token> {
        // SAFETY: the vocabulary lives as long as the model.
        let token = unsafe { sys::llama_vocab_bos(self.vocab()) };
        self.check_token(token).is_ok().then_some(token)
    }

    /// The token at the end of a text, if the vocabulary has one.
    pub fn eos(&self) -> Option<Token> {
        // SAFETY: the vocabulary lives as long as the model.
        let token = unsafe { sys::llama_vocab_eos(self.vocab()) };
        self.check_token(token).is_ok().then_some(token)
    }

    /// The model's chat template, in Jinja, if it has one.
    pub fn chat_template(&self) -> Option<&str> {
        Some(self.header().text("tokenizer.chat_template")).filter(|text| !text.is_empty())
    }

    /// The prompt for (role, content) messages in the model's chat template, if it is one that llama.cpp has built in;
    /// models without a template get `ChatML`, as in llama.cpp. With `add_assistant` it ends where the answer begins.
    pub fn chat(&self, messages: &[(&str, &str)], add_assistant: bool) -> Result<String, LlamaError> {
        let c_string = |text: &str| CString::new(text).map_err(|_| LlamaError::Nul { what: "a chat message" });
        let template = self.chat_template().map(c_string).transpose()?;
        let texts: Vec<(CString, CString)> = messages
            .iter()
            .map(|(role, content)| Ok((c_string(role)?, c_string(content)?)))
            .collect::<Result<_, LlamaError>>()?;
        let chat: Vec<sys::llama_chat_message> = texts
            .iter()
            .map(|(role, content)| sys::llama_chat_message { role: role.as_ptr(), content: content.as_ptr() })
            .collect();
        let mut buffer = vec![0u8; 2 * texts.iter().map(|(_, c)| c.as_bytes().len() + 64).sum::<usize>() + 256];
        loop {
            let capacity = i32::try_from(buffer.len())
                .map_err(|_| LlamaError::Vocab { what: "a chat", reason: "it is too long".to_owned() })?;
            let mut result = 0;
            // SAFETY: all strings live for the call; lengths are those of the slices.
            guard::call(|message, size| unsafe {
                guard::eldr_guard_chat(
                    template.as_ref().map_or(ptr::null(), |t| t.as_ptr()),
                    chat.as_ptr(),
                    chat.len(),
                    add_assistant,
                    buffer.as_mut_ptr().cast(),
                    capacity,
                    &raw mut result,
                    message,
                    size,
                )
            })
            .map_err(|e| LlamaError::Vocab { what: "a chat", reason: e.to_string() })?;
            let n = usize::try_from(result).map_err(|_| LlamaError::ChatTemplate)?;
            if n <= buffer.len() {
                buffer.truncate(n);
                return Ok(String::from_utf8_lossy(&buffer).into_owned());
            }
            buffer.resize(n, 0);
        }
    }

    pub(super) fn check_token(&self, token: Token) -> Result<(), LlamaError> {
        let limit = i64::from(self.facts().n_vocab);
        if (0..limit).contains(&i64::from(token)) {
            return Ok(());
        }
        Err(LlamaError::OutOfRange { what: "token", value: i64::from(token), limit })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::llama::testing::model;

    fn round_trip(text: &str) -> Vec<u8> {
        let tokens = model().tokenize(text, false, false).expect("any text");
        tokens.iter().flat_map(|&token| model().piece(token).expect("a token of the vocabulary")).collect()
    }

    #[test]
    fn text_comes_back_whole() {
        for text in ["", "a", "\0", "a\0b", "  two  spaces\t\n\n", "\u{fffd}", "\u{65e5}\u{672c}\u{8a9e}", "\u{1f600}"]
        {
            assert_eq!(round_trip(text), text.as_bytes(), "{text:?}");
        }
    }

    #[test]
    fn a_long_text_does_not_overflow_the_stack() {
        let text = "x".repeat(1 << 20);
        assert_eq!(round_trip(&text).len(), text.len());
        let words = "deep recursion, or not? ".repeat(20_000);
        assert_eq!(round_trip(&words).len(), words.len());
    }

    #[test]
    fn special_tokens_are_added_and_parsed_only_when_asked() {
        let bos = model().bos().expect("a first token");
        assert_eq!(model().tokenize("hi", true, false).expect("text")[0], bos);
        assert_ne!(model().tokenize("hi", false, false).expect("text")[0], bos);
        let eos = model().eos().expect("a last token");
        assert_eq!(model().tokenize("<|eos|>", false, true).expect("text"), [eos]);
        assert!(!model().tokenize("<|eos|>", false, false).expect("text").contains(&eos));
        assert!(model().is_eog(eos) && !model().is_eog(bos) && !model().is_eog(-1));
        assert_eq!(model().text(&[eos]), Ok("<|eos|>".to_owned()));
    }

    #[test]
    fn tokens_outside_the_vocabulary_are_refused() {
        assert!(model().piece(-1).is_err());
        assert!(model().piece(4096).is_err());
        assert!(model().piece(4095).is_ok());
    }

    #[test]
    fn a_chat_holds_every_message_in_order() {
        let long = "tell me ".repeat(500);
        let text = match model().chat(&[("user", &long), ("assistant", "yes"), ("user", "more")], true) {
            Ok(text) => text,
            Err(error) => {
                assert_eq!(error, LlamaError::ChatTemplate);
                assert!(model().chat_template().is_some(), "only an unknown template may be refused");
                return;
            }
        };
        let places: Vec<_> = [long.as_str(), "yes", "more"].iter().map(|part| text.find(part)).collect();
        assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{places:?}");
        assert_eq!(model().chat(&[("user", "a\0b")], true), Err(LlamaError::Nul { what: "a chat message" }));
    }

    proptest! {
        #[test]
        fn any_text_comes_back_whole(text in "\\PC{0,60}") {
            prop_assert_eq!(round_trip(&text), text.as_bytes());
        }
    }
}
