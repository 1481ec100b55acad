//! Which tokens a grammar allows next.
//!
//! Never lets a grammar reach llama.cpp that could end the process: nested deeper than its parser's stack, or asked to
//! accept what it does not allow.

use std::ffi::CString;

use llama_cpp_sys_2 as sys;

use crate::types::Token;

use super::{
    chain::{Chain, failed, no_steps},
    error::LlamaError,
    guard,
    model::Model,
};

/// Bytes of a grammar, and parentheses open at once in it. llama.cpp's parser calls itself at each of them.
const MAX_BYTES: usize = 64 << 10;
const MAX_DEPTH: usize = 64;

/// A grammar and how far a text has come in it.
pub(super) struct Grammar {
    chain: Chain,
}

impl Grammar {
    /// The start of `text` (GBNF, start symbol `root`).
    pub fn new(model: &Model, text: &str) -> Result<Self, LlamaError> {
        check(text).map_err(failed)?;
        let nul = |_| failed("the grammar holds a NUL byte; write it as \\x00".to_owned());
        let grammar = CString::new(text).map_err(nul)?;
        let steps =
            guard::eldr_guard_sampling { grammar: grammar.as_ptr(), grammar_root: c"root".as_ptr(), ..no_steps() };
        let chain = Chain::new(model, &steps)?;
        let wrong = "the grammar is not GBNF with a rule `root`, or it is left-recursive; llama.cpp's log says where";
        Ok(Self { chain: chain.ok_or_else(|| failed(wrong.to_owned()))? })
    }

    /// Whether `token` may be next.
    pub fn allows(&self, token: Token) -> Result<bool, LlamaError> {
        let mut one = [sys::llama_token_data { id: token, logit: 0.0, p: 0.0 }];
        Ok(self.chain.apply(&mut one)?.iter().any(|candidate| candidate.logit > f32::NEG_INFINITY))
    }

    /// Leaves those that may be next.
    pub fn filter(&self, candidates: &mut Vec<sys::llama_token_data>) -> Result<(), LlamaError> {
        let n_left = self.chain.apply(candidates)?.len();
        candidates.truncate(n_left);
        candidates.retain(|candidate| candidate.logit > f32::NEG_INFINITY);
        Ok(())
    }

    /// Goes on with a token that [`Grammar::allows`]. Never with one that ends a text: llama.cpp ends the process when
    /// that comes too early.
    pub fn accept(&mut self, token: Token) -> Result<(), LlamaError> {
        self.chain.accept(token)
    }
}

/// What llama.cpp's parser would not survive.
fn check(text: &str) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("the grammar is not GBNF: it is empty".to_owned());
    }
    if text.len() > MAX_BYTES {
        return Err(format!("the grammar has {} bytes; {MAX_BYTES} are allowed", text.len()));
    }
    let (mut depth, mut quote, mut is_escaped, mut is_comment) = (0usize, None, false, false);
    for c in text.chars() {
        if is_comment {
            is_comment = c != '\n';
        } else if let Some(end) = quote {
            if is_escaped {
                is_escaped = false;
            } else if c == '\\' {
                is_escaped = true;
            } else if c == end {
                quote = None;
            }
        } else {
            match c {
                '"' => quote = Some('"'),
                '[' => quote = Some(']'),
                '#' => is_comment = true,
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
        }
        if depth > MAX_DEPTH {
            return Err(format!("the grammar has more than {MAX_DEPTH} parentheses open at once"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::testing::model;

    fn error(text: &str) -> String {
        Grammar::new(model(), text).err().unwrap_or_else(|| panic!("{text:?} is taken for a grammar")).to_string()
    }

    #[test]
    fn what_is_no_grammar_is_refused() {
        for text in ["", "root ::= (", "rule ::= \"a\"", "root ::= root \"a\"", "root ::= \"a\"{3000}", "root ::= x"] {
            assert!(error(text).contains("grammar is not GBNF"), "{text}");
        }
        assert!(error("root ::= \"a\0\"").contains("NUL"));
        assert!(error(&format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65))).contains("parentheses"));
        assert!(error(&format!("root ::= \"{}\"", "a".repeat(70_000))).contains("bytes"));
        assert!(Grammar::new(model(), &format!("root ::= \"{}\" # ((", "(".repeat(100))).is_ok());
    }

    #[test]
    fn only_what_continues_the_grammar_is_allowed() {
        let mut grammar = Grammar::new(model(), "root ::= \"ab\" | \"cd\"").expect("a grammar");
        let token = |text: &str| model().tokenize(text, false, false).expect("text")[0];
        let eos = model().eos().expect("a last token");
        assert!(grammar.allows(token("a")) == Ok(true) && grammar.allows(token("c")) == Ok(true));
        assert!(grammar.allows(token("b")) == Ok(false) && grammar.allows(eos) == Ok(false));
        grammar.accept(token("a")).expect("allowed");
        assert!(grammar.allows(token("b")) == Ok(true) && grammar.allows(token("d")) == Ok(false));
        grammar.accept(token("b")).expect("allowed");
        assert_eq!(grammar.allows(eos), Ok(true));
    }
}
