//! Moving a sequence between contexts changes nothing that follows, and contexts that cannot exchange state say why.

use std::{path::Path, sync::OnceLock};

use eldr::{
    llama::{Backend, Batch, Context, ContextParams, KvType, LlamaError, Model, ModelParams},
    types::Token,
};

const SLOTS: u32 = 4;

fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| {
        let backend = Backend::init();
        let device = Some(backend.device("cpu").expect("a CPU"));
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/tiny-moe-64x4.gguf");
        Model::load(&backend, path, &ModelParams { device, ..ModelParams::default() }).expect("the shipped model")
    })
}

fn context(params: ContextParams) -> Context {
    Context::new(model(), &ContextParams { n_slots: SLOTS, n_ctx_slot: 256, ..params }).expect("a context")
}

/// `n` tokens about subject `i`.
fn prompt(i: usize, n: usize) -> Vec<Token> {
    let subjects = [
        "for name in names:\n    print(name)\n",
        "Let x be the number of apples, so that 3 x = 12. ",
        "The lease ends on the first day of May unless the tenant gives notice. ",
        "Le vent souffle du nord et la mer est grise. ",
    ];
    let text = subjects[i % subjects.len()].repeat(n / 4 + 1);
    model().tokenize(&text, true, false).expect("plain text")[..n].to_vec()
}

/// Runs a prompt in parts of `chunk` tokens; the logits of its last token, as bits.
fn prefill(context: &mut Context, tokens: &[Token], seq: u32, chunk: usize) -> Vec<u32> {
    let mut bits = Vec::new();
    for (n, part) in tokens.chunks(chunk).enumerate() {
        let mut batch = Batch::new(part.len());
        for (i, &token) in part.iter().enumerate() {
            let position = n * chunk + i;
            let is_last = position + 1 == tokens.len();
            batch.push(token, u32::try_from(position).expect("short"), seq, is_last).expect("room");
        }
        context.decode(&batch).expect("a prefill");
        if (n * chunk + part.len()) == tokens.len() {
            bits = context.logits(part.len() - 1).iter().map(|x| x.to_bits()).collect();
        }
    }
    bits
}

/// One step of several sequences (slot, token, position), ascending; the logits of each, as bits.
fn step(context: &mut Context, items: &[(u32, Token, u32)]) -> Vec<Vec<u32>> {
    let mut batch = Batch::new(items.len());
    for &(seq, token, position) in items {
        batch.push(token, position, seq, true).expect("room");
    }
    context.decode(&batch).expect("a step");
    (0..items.len()).map(|row| context.logits(row).iter().map(|x| x.to_bits()).collect()).collect()
}

fn best(bits: &[u32]) -> Token {
    let largest = (0..bits.len()).max_by(|&a, &b| f32::from_bits(bits[a]).total_cmp(&f32::from_bits(bits[b])));
    Token::try_from(largest.expect("a vocabulary")).expect("a token")
}

/// Generates `n` tokens greedily in `seq`, beside one other sequence; every step's logits.
fn generate(context: &mut Context, seq: u32, mate: u32, at: &mut (Token, u32), n: usize) -> Vec<Vec<u32>> {
    let mut seen = Vec::new();
    for _ in 0..n {
        let mate_at = context.seq_pos_max(mate).expect("a slot").map_or(0, |p| p + 1);
        let mut items = [(seq, at.0, at.1), (mate, 40 + seq.cast_signed(), mate_at)];
        items.sort_unstable();
        let row = usize::from(items[1].0 == seq);
        let bits = step(context, &items).swap_remove(row);
        *at = (best(&bits), at.1 + 1);
        seen.push(bits);
    }
    seen
}

#[test]
fn a_sequence_that_moves_goes_on_as_one_that_stays() {
    let tokens = prompt(0, 100);
    let mut home = context(ContextParams::default());
    let mut here = context(ContextParams { n_ubatch: 32, n_threads: 2, ..ContextParams::default() });
    let mut there = context(ContextParams::default());
    prefill(&mut home, &prompt(1, 30), 1, 256);
    prefill(&mut here, &prompt(2, 70), 0, 256);
    prefill(&mut here, &prompt(3, 20), 1, 256);

    let first = best(&prefill(&mut home, &tokens, 0, 256));
    let state = home.state_get(0).expect("a state");
    let mut at = (first, 100);
    let stayed = generate(&mut home, 0, 1, &mut at, 24);

    here.state_set(2, &state, 100).expect("taken");
    let mut at = (first, 100);
    let mut moved = generate(&mut here, 2, 1, &mut at, 10);
    let state = here.state_get(2).expect("a state");
    there.state_set(3, &state, 110).expect("taken again");
    moved.extend(generate(&mut there, 3, 2, &mut at, 14));
    assert!(moved == stayed, "{} of 24 steps are equal", moved.iter().zip(&stayed).filter(|(a, b)| a == b).count());
}

#[test]
fn a_state_is_the_same_bytes_wherever_the_prompt_is_cut() {
    let tokens = prompt(2, 150);
    let mut whole = context(ContextParams::default());
    let logits = prefill(&mut whole, &tokens, 1, 256);
    let state = whole.state_get(1).expect("a state");
    for (chunk, n_ubatch) in [(32, 512), (64, 512), (50, 512), (256, 40)] {
        let mut cut = context(ContextParams { n_ubatch, ..ContextParams::default() });
        assert!(prefill(&mut cut, &tokens, 1, chunk) == logits, "logits in parts of {chunk}");
        assert!(cut.state_get(1).expect("a state") == state, "state in parts of {chunk}");
    }
}

#[test]
fn what_differs_is_named_and_nothing_is_taken() {
    let base = ContextParams::default();
    let mut home = context(base.clone());
    prefill(&mut home, &prompt(0, 40), 0, 256);
    let state = home.state_get(0).expect("a state");
    for (setting, params) in [
        ("KV streams", ContextParams { kv_unified: true, ..base.clone() }),
        ("key type", ContextParams { type_k: KvType::Q8_0, ..base.clone() }),
        ("value type", ContextParams { type_v: KvType::F32, ..base.clone() }),
        ("flash attention", ContextParams { flash_attn: true, ..base }),
    ] {
        let mut other = context(params);
        let pairs = home.fingerprint().into_iter().zip(other.fingerprint());
        let differ: Vec<_> = pairs.filter(|(a, b)| a != b).map(|(a, _)| a.0).collect();
        assert_eq!(differ, [setting]);
        let error = other.state_set(0, &state, 40).expect_err(setting);
        assert!(matches!(error, LlamaError::StateSet { .. }), "{setting}: {error}");
        assert_eq!(other.seq_pos_max(0), Ok(None), "{setting}");
    }
    let mut same = context(ContextParams { n_ubatch: 64, n_batch: 128, n_threads: 2, ..ContextParams::default() });
    assert_eq!(home.fingerprint(), same.fingerprint());
    same.state_set(3, &state, 40).expect("sizes and threads do not matter");
}
