//! Planted models run by llama.cpp: the tap sees exactly the picks that were planted, in every architecture and however
//! a batch is cut, and a hand-off changes no logit.

mod support;

use std::fs;

use eldr::{
    llama::{Backend, Batch, Context, ContextParams, Model, ModelParams},
    types::Token,
};
use support::planted::{self, Arch, Planted};
use tempfile::TempDir;

/// A planted model in memory, and the folder of its file.
struct Rig {
    planted: Planted,
    model: Model,
    _dir: TempDir,
}

/// What one call of the tap said: MoE layer, then the sorted picks of each row of the batch.
type Tapped = Vec<(u32, Vec<Vec<u32>>)>;

impl Rig {
    fn new(arch: Arch) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let planted = planted::write(arch, &dir.path().join("planted.gguf"), 1);
        let backend = Backend::init();
        let device = backend.device("CPU").expect("every build has it");
        let params = ModelParams { device: Some(device), ..ModelParams::default() };
        let model = Model::load(&backend, &planted.path, &params).expect("loads");
        Self { planted, model, _dir: dir }
    }

    fn context(&self, params: ContextParams) -> Context {
        let params = ContextParams { n_ctx_slot: 256, n_threads: 1, n_outputs: 512, ..params };
        Context::new(&self.model, &params).expect("a context")
    }

    /// A context of four slots with a tap on `layers`.
    fn tapped(&self, n_ubatch: u32, kv_unified: bool, layers: &[u32]) -> Context {
        let mut ctx =
            self.context(ContextParams { n_slots: 4, n_ubatch, kv_unified, tap: true, ..ContextParams::default() });
        ctx.set_tap_layers(layers).expect("a tap");
        ctx
    }

    fn all_layers(&self) -> Vec<u32> {
        (0..self.planted.shape.n_layer_moe() as u32).collect()
    }

    fn expected(&self, tokens: &[Token], layer: u32) -> Vec<Vec<u32>> {
        tokens.iter().map(|&token| self.planted.expected_picks(token, layer).to_vec()).collect()
    }
}

/// Runs `tokens` of `seq` from `pos` on; logits of the last one.
fn batch_of(tokens: &[Token], pos: u32, seq: u32) -> Batch {
    let mut batch = Batch::new(tokens.len());
    for (i, &token) in tokens.iter().enumerate() {
        batch.push(token, pos + i as u32, seq, i + 1 == tokens.len()).expect("room");
    }
    batch
}

fn run_tapped(ctx: &mut Context, batch: &Batch) -> Tapped {
    let mut tapped = Vec::new();
    ctx.decode_tapped(batch, &mut |rows| {
        let sorted = rows.tokens().map(|picks| {
            let mut picks = picks.to_vec();
            picks.sort_unstable();
            picks
        });
        tapped.push((rows.layer, sorted.collect()));
    })
    .expect("runs");
    tapped
}

fn prefill(ctx: &mut Context, tokens: &[Token], seq: u32) {
    ctx.decode(&batch_of(tokens, 0, seq)).expect("runs");
}

fn counts(n_expert: u32, picks: &[Vec<u32>]) -> Vec<u32> {
    let mut counts = vec![0; n_expert as usize];
    for &expert in picks.iter().flatten() {
        counts[expert as usize] += 1;
    }
    counts
}

#[test]
fn llama_cpp_reads_the_shape_and_vocabulary_that_were_written() {
    for arch in Arch::MOE.into_iter().chain([Arch::DenseLlama]) {
        let rig = Rig::new(arch);
        let shape = Some(&rig.planted.shape).filter(|shape| shape.n_layer_moe() > 0);
        assert_eq!(rig.model.moe_shape(), shape, "{arch:?}");
        let text = "It's {a} test:\n\t~ 2 + 2 = \"four\"!";
        assert_eq!(rig.model.tokenize(text, true, true).expect("tokens"), planted::tokens_of(text), "{arch:?}");
        assert_eq!(rig.model.text(&planted::tokens_of(text)).expect("text"), text, "{arch:?}");
        assert_eq!(rig.model.n_vocab(), planted::N_VOCAB);
    }
}

#[test]
fn the_same_seed_writes_the_same_file() {
    let dir = tempfile::tempdir().expect("a folder");
    for arch in Arch::MOE {
        let bytes = |seed| {
            let path = dir.path().join("model.gguf");
            planted::write(arch, &path, seed);
            fs::read(path).expect("written")
        };
        assert_eq!(bytes(7), bytes(7), "{arch:?}");
        assert_ne!(bytes(7), bytes(8), "{arch:?}");
    }
}

#[test]
fn prefill_counts_equal_the_known_picks_however_the_prompt_is_cut() {
    let prompt = planted::some_tokens(100, 5);
    for arch in Arch::MOE {
        let rig = Rig::new(arch);
        let usable = rig.planted.shape.usable();
        for (n_ubatch, kv_unified, chunk) in
            [(512, true, 100), (512, false, 100), (8, true, 100), (8, false, 100), (512, false, 32), (8, true, 13)]
        {
            let case = format!("{arch:?}, ubatch {n_ubatch}, unified {kv_unified}, chunk {chunk}");
            let mut ctx = rig.tapped(n_ubatch, kv_unified, &usable);
            let mut picks = vec![Vec::new(); usable.len()];
            for (i, tokens) in prompt.chunks(chunk).enumerate() {
                // Not the first slot, so that a mix-up of sequences would show.
                let tapped = run_tapped(&mut ctx, &batch_of(tokens, (i * chunk) as u32, 2));
                assert_eq!(ctx.n_ubatches() as usize, tokens.len().div_ceil(n_ubatch as usize), "{case}");
                assert_eq!(tapped.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), usable, "{case}");
                for (all, (_, chunk)) in picks.iter_mut().zip(tapped) {
                    all.extend(chunk);
                }
            }
            for (&layer, picks) in usable.iter().zip(&picks) {
                assert_eq!(*picks, rig.expected(&prompt, layer), "{case}, layer {layer}");
                let known = rig.planted.expected_counts(&prompt, layer);
                assert_eq!(counts(rig.planted.shape.n_expert, picks), known, "{case}, layer {layer}");
                assert_eq!(known.iter().sum::<u32>(), 100 * rig.planted.shape.n_expert_used, "{case}");
            }
        }
    }
}

#[test]
fn the_last_layer_is_no_part_of_a_prompts_counts() {
    let prompt = planted::some_tokens(40, 9);
    for arch in Arch::MOE {
        let rig = Rig::new(arch);
        let last = rig.planted.shape.n_layer_moe() as u32 - 1;
        assert!(!rig.planted.shape.usable().contains(&last), "{arch:?}");
        for n_ubatch in [8, 512] {
            let mut ctx = rig.tapped(n_ubatch, false, &rig.all_layers());
            let tapped = run_tapped(&mut ctx, &batch_of(&prompt, 0, 0));
            // llama.cpp computes it for the last row only, but for all rows in the two architectures that can hand
            // every row's hidden state to a draft model. Short rows must never be handed out.
            let whole = matches!(arch, Arch::GptOss | Arch::Gemma4);
            assert_eq!(tapped.iter().any(|(layer, _)| *layer == last), whole, "{arch:?}, ubatch {n_ubatch}");
            for (layer, picks) in tapped {
                assert_eq!(picks, rig.expected(&prompt, layer), "{arch:?}, ubatch {n_ubatch}, layer {layer}");
            }
        }
    }
}

#[test]
fn each_sequence_of_a_decode_step_has_its_own_picks() {
    let prompts = [20, 3, 33, 9].map(|n| planted::some_tokens(n, n as u64));
    for arch in Arch::MOE {
        let rig = Rig::new(arch);
        for (n_ubatch, kv_unified, slots) in [
            (512, true, vec![0, 1, 2, 3]),
            (512, false, vec![0, 1, 2, 3]),
            (512, true, vec![0, 2, 3]),
            (512, false, vec![0, 2, 3]),
            (2, true, vec![0, 1, 3]),
            (2, false, vec![0, 1, 3]),
        ] {
            let case = format!("{arch:?}, ubatch {n_ubatch}, unified {kv_unified}, slots {slots:?}");
            let mut ctx = rig.tapped(n_ubatch, kv_unified, &rig.all_layers());
            for &slot in &slots {
                prefill(&mut ctx, &prompts[slot as usize], slot);
            }
            for step in 0..8 {
                let next = planted::some_tokens(slots.len(), 100 + step);
                let mut batch = Batch::new(slots.len());
                for (&slot, &token) in slots.iter().zip(&next) {
                    let pos = prompts[slot as usize].len() as u32 + step as u32;
                    batch.push(token, pos, slot, true).expect("room");
                }
                let tapped = run_tapped(&mut ctx, &batch);
                // Every row's logits are wanted, so the last layer is whole too.
                assert_eq!(tapped.len(), rig.planted.shape.n_layer_moe(), "{case}");
                for (layer, picks) in tapped {
                    assert_eq!(picks, rig.expected(&next, layer), "{case}, step {step}, layer {layer}");
                }
            }
        }
    }
}

/// Runs `tokens` one by one from `pos` on; the logits after each.
fn decode_on(ctx: &mut Context, tokens: &[Token], pos: usize, seq: u32) -> Vec<Vec<f32>> {
    let steps = tokens.iter().enumerate().map(|(i, &token)| {
        ctx.decode(&batch_of(&[token], (pos + i) as u32, seq)).expect("runs");
        ctx.logits(0).to_vec()
    });
    steps.collect()
}

fn bits(logits: &[Vec<f32>]) -> Vec<u32> {
    logits.iter().flatten().map(|v| v.to_bits()).collect()
}

fn furthest(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn a_hand_off_changes_no_logit() {
    let (next, other) = (planted::some_tokens(30, 4), planted::some_tokens(10, 8));
    for arch in Arch::MOE.into_iter().chain([Arch::DenseLlama]) {
        let rig = Rig::new(arch);
        // Both longer than the sliding window. A state holds the window's positions only and is packed anew, here by
        // 64 or by 44 cells: sums over cells keep their order only if they move by whole vectors.
        for (kv_unified, n, whole) in [(true, 80, true), (false, 80, true), (true, 60, false), (false, 60, false)] {
            let case = format!("{arch:?}, unified {kv_unified}, {n} tokens");
            assert_eq!(whole, (n - Arch::WINDOW as usize).is_multiple_of(64));
            let prompt = planted::some_tokens(n, 3);
            let params = ContextParams { n_slots: 3, kv_unified, ..ContextParams::default() };
            let mut here = rig.context(params.clone());
            prefill(&mut here, &prompt, 1);
            let state = here.state_get(1).expect("exported");
            let stayed = decode_on(&mut here, &next, n, 1);

            let mut there = rig.context(params.clone());
            if !kv_unified {
                // With one stream for all, a neighbour shifts the cells of the cache and so the order of sums.
                prefill(&mut there, &other, 0);
            }
            there.state_set(2, &state, n as u32).expect("imported");
            let went = decode_on(&mut there, &next, n, 2);
            there.state_set(2, &state, n as u32).expect("imported into a used slot");
            assert!(bits(&decode_on(&mut there, &next, n, 2)) == bits(&went), "{case}: a second import differs");
            here.state_set(1, &state, n as u32).expect("imported in place");
            assert!(bits(&decode_on(&mut here, &next, n, 1)) == bits(&went), "{case}: an import in place differs");
            let apart = furthest(&stayed, &went);
            if whole || !arch.has_window() {
                assert!(bits(&stayed) == bits(&went), "{case}: logits differ by {apart}");
            } else {
                assert!(apart < 1e-3, "{case}: logits differ by {apart}");
            }

            // The prompt matters for these logits: an empty cache would not pass.
            there.clear_seq(2).expect("emptied");
            let alone = decode_on(&mut there, &next[..1], 0, 2);
            assert!(furthest(&alone, &went[..1]) > 0.1, "{case}: the prompt moves no logit");
        }
    }
}
