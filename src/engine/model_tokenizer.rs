use crate::{
    engine::Tokenizer,
    llama::{Model, Sampler},
    types::Token,
};

/// The vocabulary of a loaded model.
pub struct ModelTokenizer {
    model: Model,
    end_tokens: Vec<Token>,
}

impl ModelTokenizer {
    /// The vocabulary of `model`.
    pub fn new(model: Model) -> Self {
        let n_vocab = Token::try_from(model.n_vocab()).unwrap_or(Token::MAX);
        let end_tokens = (0..n_vocab).filter(|&token| model.is_eog(token)).collect();
        Self { model, end_tokens }
    }
}

impl Tokenizer for ModelTokenizer {
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, String> {
        self.model.tokenize(text, true, true).map_err(|error| error.to_string())
    }

    fn tokenize_as(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, String> {
        self.model.tokenize(text, add_special, parse_special).map_err(|error| error.to_string())
    }

    fn check_grammar(&self, grammar: &str) -> Result<(), String> {
        Sampler::check_grammar(&self.model, grammar).map_err(|error| error.to_string())
    }

    fn piece(&self, token: Token) -> Vec<u8> {
        self.model.piece(token).unwrap_or_default()
    }

    fn end_tokens(&self) -> &[Token] {
        &self.end_tokens
    }

    fn n_tokens(&self) -> u32 {
        u32::try_from(self.model.n_vocab()).unwrap_or(u32::MAX)
    }
}
