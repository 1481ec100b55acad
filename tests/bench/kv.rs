//! What the block ledger and its rows cost: finding a prefix, adding a row, dropping the oldest block, in ledgers of a
//! thousand to a million blocks; and taking a prompt in, a token. The target is 50 ns a token.
//!
//! Prompts branch from shared beginnings, as those of a service with system prompts do.

use std::sync::Arc;

use divan::{Bencher, counter::ItemsCount};
use eldr::{
    kv::{BLOCK, BlockEvent, BlockName, ChunkCounts, Ledger, SignatureRows},
    rng::Rng,
    types::Token,
};

const SIZES: [usize; 3] = [1_000, 100_000, 1_000_000];
/// Blocks of a prompt: 4,096 tokens.
const N_BLOCKS: usize = 128;
/// Of those, blocks of the beginning it shares.
const N_SHARED: usize = 32;
const N_BEGINNINGS: usize = 8;
const N_LAYERS: u32 = 24;
const N_EXPERT: u32 = 128;

fn main() {
    divan::main();
}

fn tokens(rng: &mut Rng, n_blocks: usize) -> Vec<Token> {
    (0..n_blocks * BLOCK as usize).map(|_| Token::try_from(rng.below(50_000)).expect("small")).collect()
}

/// A ledger of `n_blocks` blocks, and a prompt whose first half it holds.
fn full(n_blocks: usize) -> (Ledger, Vec<Token>) {
    full_with(n_blocks, |_| ())
}

/// The same; `taken` hears what happened to it with each sequence.
fn full_with(n_blocks: usize, mut taken: impl FnMut(&[BlockEvent])) -> (Ledger, Vec<Token>) {
    let mut rng = Rng::new(1);
    let beginnings: Vec<_> = (0..N_BEGINNINGS).map(|_| tokens(&mut rng, N_SHARED)).collect();
    let n_sequences = n_blocks.div_ceil(N_BLOCKS - N_SHARED);
    let mut ledger = Ledger::new(BLOCK, BlockName::root(["bench"]), n_sequences + 1);
    let (mut prompt, mut events) = (Vec::new(), Vec::new());
    for sequence in 0..n_sequences {
        prompt.clone_from(&beginnings[sequence % N_BEGINNINGS]);
        prompt.extend(tokens(&mut rng, N_BLOCKS - N_SHARED));
        ledger.append(sequence, &prompt);
        ledger.take_events(&mut events);
        taken(&events);
        events.clear();
    }
    prompt.truncate(prompt.len() / 2);
    prompt.extend(tokens(&mut rng, N_BLOCKS / 2));
    (ledger, prompt)
}

#[divan::bench(args = SIZES)]
fn longest_prefix_of_4096_tokens(bencher: Bencher<'_, '_>, n_blocks: usize) {
    let (ledger, prompt) = full(n_blocks);
    let n = ledger.match_prefix(&prompt).n_tokens;
    assert_eq!(n as usize, prompt.len() / 2);
    bencher.bench_local(|| ledger.match_prefix(divan::black_box(&prompt)));
}

#[divan::bench(args = SIZES, sample_count = 200)]
fn oldest_block_dropped(bencher: Bencher<'_, '_>, n_blocks: usize) {
    let (mut ledger, _) = full(n_blocks);
    let mut events = Vec::new();
    bencher.bench_local(|| {
        events.clear();
        ledger.take_events(&mut events);
        ledger.evict_block()
    });
}

/// A chunk of 512 tokens goes in and out again, with and without its rows.
#[divan::bench(args = SIZES)]
fn token_taken_in(bencher: Bencher<'_, '_>, n_blocks: usize) {
    let (mut ledger, prompt) = full(n_blocks);
    let (chunk, last) = (&prompt[prompt.len() - 512..], n_blocks.div_ceil(N_BLOCKS - N_SHARED));
    let mut events = Vec::new();
    bencher.counter(ItemsCount::new(chunk.len())).bench_local(|| {
        ledger.append(last, divan::black_box(chunk));
        ledger.clear(last);
        events.clear();
        ledger.take_events(&mut events);
    });
}

/// A row of 24 x 128 filled from a chunk's counts, in an arena of `n_blocks` of them (3 GiB for a million).
#[divan::bench(args = SIZES)]
fn row_added(bencher: Bencher<'_, '_>, n_blocks: usize) {
    let layers: Arc<[u32]> = (0..N_LAYERS).collect();
    let mut rows = SignatureRows::new(&layers, N_EXPERT);
    let counts = |n_tokens: u32| {
        let mut counts = ChunkCounts::new(&layers, N_EXPERT, BLOCK, 0, n_tokens, 0);
        for (layer, token) in (0..N_LAYERS).flat_map(|layer| (0..n_tokens).map(move |token| (layer, token))) {
            counts.add(layer, token as usize, &[token % 64, 64 + token % 64]);
        }
        counts
    };
    let (of_prompt, of_block) = (counts(N_BLOCKS as u32 * BLOCK), counts(BLOCK));
    let (mut ledger, _) = full_with(n_blocks, |events| rows.follow(events, Some(&of_prompt)));
    let last = n_blocks.div_ceil(N_BLOCKS - N_SHARED);
    let (mut events, block) = (Vec::new(), tokens(&mut Rng::new(2), 1));
    bencher.bench_local(|| {
        ledger.append(last, divan::black_box(&block));
        ledger.clear(last);
        events.clear();
        ledger.take_events(&mut events);
        rows.follow(&events, Some(&of_block));
    });
}

/// The counts of a prompt of 4,096 tokens, 128 rows of 24 x 128, after those of another one with which it shares `n_shared`
/// blocks: what the other has beyond them is subtracted, or all is added anew where that is less.
#[divan::bench(args = [0, 32, 96, 120])]
fn rows_summed(bencher: Bencher<'_, '_>, n_shared: usize) {
    let layers: Arc<[u32]> = (0..N_LAYERS).collect();
    let mut rows = SignatureRows::new(&layers, N_EXPERT);
    let mut ledger = Ledger::new(BLOCK, BlockName::root(["bench"]), 2);
    let end = N_BLOCKS as u32 * BLOCK;
    let counts = ChunkCounts::new(&layers, N_EXPERT, BLOCK, 0, end, 0);
    let mut prompt = tokens(&mut Rng::new(3), N_BLOCKS);
    let mut events = Vec::new();
    for sequence in 0..2 {
        prompt.truncate(n_shared * BLOCK as usize);
        prompt.extend(tokens(&mut Rng::new(4 + sequence as u64), N_BLOCKS - prompt.len() / BLOCK as usize));
        ledger.append(sequence, &prompt);
        ledger.take_events(&mut events);
        rows.follow(&events, Some(&counts));
        events.clear();
    }
    let mut sequence = 0;
    bencher.bench_local(|| {
        sequence = 1 - sequence;
        rows.sum(divan::black_box(&ledger), sequence).expect("counted")
    });
}
