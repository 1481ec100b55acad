//! Small models whose expert picks are known before llama.cpp sees them, in several architectures.
//!
//! Never asks llama.cpp what a pick is: `gate` computes the picks from the scores that were planted.
//!
//! How it works: dimension t of the residual stream belongs to token t and holds its embedding; nothing else ever writes
//! there. Attention and experts do write, a little, to the scratch dimensions above, so that keys, values and expert
//! weights matter for the logits. A gate that reads token dimensions only then sees a table: one row of scores a token.

mod arch;
mod gate;
mod tensors;
pub mod vocab;

use std::path::{Path, PathBuf};

use eldr::{
    llama::gguf_file::GgufWriter,
    rng::{Rng, mix},
    types::{MoeShape, Token},
};

pub use arch::Arch;
use gate::Gate;
use tensors::Tensors;
pub use vocab::{N_VOCAB, token_of};

/// A planted model's file and what every token picks in it.
#[derive(Debug, Clone)]
pub struct Planted {
    pub path: PathBuf,
    pub arch: Arch,
    /// No MoE layers if the model is dense.
    pub shape: MoeShape,
    /// By MoE layer, then token: the experts picked, ascending.
    picks: Vec<Vec<Vec<u32>>>,
    /// By MoE layer: what its gate says of every token.
    gates: Vec<Gate>,
}

/// Writes the planted model of `arch` and `seed` to `path`; the same arguments write the same bytes.
pub fn write(arch: Arch, path: &Path, seed: u64) -> Planted {
    let mut rng = Rng::new(mix(seed ^ arch as u64));
    let mut writer = GgufWriter::new();
    let mut tensors = Tensors::default();
    vocab::put(&mut writer);
    let gates = arch::put(arch, &mut writer, &mut tensors, &mut rng);
    tensors.write(writer, path);
    let shape = MoeShape {
        layers: gates.iter().map(|(layer, _)| *layer).collect(),
        n_layer: arch.n_layer(),
        n_expert: arch.n_expert(),
        n_expert_used: arch.n_expert_used(),
    };
    let gates: Vec<Gate> = gates.into_iter().map(|(_, gate)| gate).collect();
    let picks = gates.iter().map(|gate| gate.picks.clone()).collect();
    Planted { path: path.to_owned(), arch, shape, picks, gates }
}

impl Planted {
    /// The experts `token` picks in MoE layer `layer`, ascending.
    pub fn expected_picks(&self, token: Token, layer: u32) -> &[u32] {
        &self.picks[layer as usize][token as usize]
    }

    /// How many of `tokens` pick each expert of MoE layer `layer`.
    pub fn expected_counts(&self, tokens: &[Token], layer: u32) -> Vec<u32> {
        let mut counts = vec![0; self.shape.n_expert as usize];
        for &token in tokens {
            for &expert in self.expected_picks(token, layer) {
                counts[expert as usize] += 1;
            }
        }
        counts
    }

    /// What the gate of MoE layer `layer` was planted to say of `token`.
    pub fn expected_gate(&self, token: Token, layer: u32) -> Said<'_> {
        let (gate, token) = (&self.gates[layer as usize], token as usize);
        Said { scores: &gate.scores[token], logits: &gate.logits[token] }
    }
}

/// What a gate says of a token, by expert: scores, and scores with their bias.
#[derive(Debug, Clone, Copy)]
pub struct Said<'a> {
    pub scores: &'a [f64],
    pub logits: &'a [f64],
}

/// The tokens of ASCII text: one a character.
pub fn tokens_of(text: &str) -> Vec<Token> {
    text.chars().map(token_of).collect()
}

/// `n` tokens of `seed`, from the whole vocabulary but the two control tokens.
pub fn some_tokens(n: usize, seed: u64) -> Vec<Token> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| Token::try_from(2 + rng.below(N_VOCAB - 2)).expect("a small vocabulary")).collect()
}
