use crate::types::Token;

/// Turns text into a model's tokens and back. The engine shares one among all threads.
pub trait Tokenizer: Send + Sync {
    /// The tokens of `text`, with the special tokens the model wants at the start of a prompt. Empty text may have
    /// none.
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String>;

    /// The bytes of one token; part of a character, perhaps.
    fn piece(&self, token: Token) -> Vec<u8>;

    /// Tokens that end a text, ascending.
    fn end_tokens(&self) -> &[Token];

    /// Tokens are `0..n_tokens()`.
    fn n_tokens(&self) -> u32;
}
