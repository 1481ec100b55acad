use crate::types::Token;

/// Turns text into a model's tokens and back. The engine shares one among all threads.
///
/// ```
/// use eldr::{engine::Tokenizer, types::Token};
///
/// /// One token a byte; the NUL ends a text.
/// struct Bytes;
///
/// impl Tokenizer for Bytes {
///     fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
///         Ok(text.bytes().map(Token::from).collect())
///     }
///
///     fn piece(&self, token: Token) -> Vec<u8> {
///         vec![token as u8]
///     }
///
///     fn end_tokens(&self) -> &[Token] {
///         &[0]
///     }
///
///     fn n_tokens(&self) -> u32 {
///         256
///     }
/// }
///
/// let text: Vec<u8> = Bytes.tokenize("eldr").expect("bytes").iter().flat_map(|&token| Bytes.piece(token)).collect();
/// assert_eq!(text, b"eldr");
/// ```
pub trait Tokenizer: Send + Sync {
    /// The tokens of `text`, with the special tokens the model wants at the start of a prompt. Empty text may have
    /// none.
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String>;

    /// The tokens of `text`; `add_special` puts the model's first and last tokens around it, `parse_special` reads
    /// special tokens written out in the text as such. Unless overridden, as [`Tokenizer::tokenize`].
    fn tokenize_as(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, String> {
        let _ = (add_special, parse_special);
        self.tokenize(text)
    }

    /// Says why `grammar` (GBNF, start symbol `root`) can not steer this vocabulary's draws.
    fn check_grammar(&self, grammar: &str) -> Result<(), String> {
        let _ = grammar;
        Err("this engine's workers draw without grammars".to_owned())
    }

    /// The bytes of one token; part of a character, perhaps.
    fn piece(&self, token: Token) -> Vec<u8>;

    /// Tokens that end a text, ascending.
    fn end_tokens(&self) -> &[Token];

    /// Tokens are `0..n_tokens()`.
    fn n_tokens(&self) -> u32;
}
