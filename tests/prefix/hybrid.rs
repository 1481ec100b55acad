//! A model whose memory can not be cut, through llama.cpp: some layers keep a state of the last tokens only.

use std::{path::Path, sync::Arc};

use eldr::{
    engine::{EngineConfig, LlamaRunner, LoadedModel, TapUse},
    llama::{ContextParams, Model},
    schedule::{DecodeWorker, Handoff, ModelRunner, Reuse, WorkerEvent},
    types::Token,
};

use super::{
    CHUNK, Rig, load, same,
    support::planted::{self, Arch, Planted},
    tiers,
};

fn write(dir: &Path) -> Planted {
    planted::write(Arch::HYBRID, &dir.join("hybrid.gguf"), 3)
}

/// The tokens that a decode worker draws for a hand-off.
fn answer(model: &Model, handoff: Handoff) -> Vec<Token> {
    let params = ContextParams { n_slots: 2, n_ctx_slot: 512, ..ContextParams::default() };
    let mut runner = LlamaRunner::new(model, &params, &TapUse::Off, true).unwrap();
    let mut worker = DecodeWorker::new(runner.info(), CHUNK, &[]);
    worker.admit(handoff);
    let mut events = Vec::new();
    while !worker.is_idle() {
        worker.step(&mut runner, &mut events);
    }
    let drawn = events.into_iter().filter_map(|event| match event {
        WorkerEvent::Token { token, .. } => Some(token),
        WorkerEvent::Returned { error, .. } | WorkerEvent::Lost { error } => panic!("{error}"),
        _ => None,
    });
    drawn.collect()
}

#[test]
fn it_is_known_at_load_and_a_prompt_goes_on_only_where_another_ended() {
    let dir = tempfile::tempdir().unwrap();
    let planted = write(dir.path());
    let model = load(&planted.path);
    assert!(model.facts().hybrid && model.moe_shape() == Some(&planted.shape));
    let mut cold = Rig::new(&model, ContextParams::default(), 0);
    let mut warm = Rig::aligned(&model, ContextParams::default(), 1 << 20, CHUNK);
    assert_eq!(warm.runner.info().reuse, Reuse::Whole);
    let part = planted::some_tokens;
    let (a, b) = (part(128, 1), part(50, 2));
    let ab = [&a[..], &b].concat();
    let mut said = Vec::new();
    // Its end, where a cold prefill is cut too; the same again, cut nowhere; another branch; the end of the second prompt.
    for (prompt, n_cached, n_fallbacks) in
        [(&a, 0, 0), (&ab, 128, 0), (&ab, 0, 1), (&[&a[..100], &b].concat(), 0, 2), (&[&ab[..], &b].concat(), 0, 3)]
    {
        let (want, got) = (cold.run(prompt), warm.run(prompt));
        same(&got, &want, true, &mut cold);
        assert_eq!((got.job.n_cached, warm.stats.n_fallbacks), (n_cached, n_fallbacks), "{} tokens", prompt.len());
        for layer in planted.shape.usable() {
            assert_eq!(got.counts.as_ref().unwrap().row(layer).unwrap(), planted.expected_counts(prompt, layer));
        }
        let [want, got] = [want, got].map(|mut handoff| {
            Arc::get_mut(&mut handoff.job.request).unwrap().max_tokens = 30;
            answer(&model, handoff)
        });
        assert_eq!(got, want, "the text after {} tokens", prompt.len());
        assert_eq!(got.len(), 29);
        said.push(got);
    }
    assert!(said[0] != said[1]);
    assert!(warm.worker.pin(&a).unwrap_err().contains("can not be cut"));
}

#[test]
fn the_third_prompt_that_begins_alike_finds_a_state_kept_for_it_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let planted = write(dir.path());
    let model = load(&planted.path);
    let system = planted::some_tokens(90, 1);
    let prompts: Vec<_> = (2..6).map(|seed| [&system[..], &planted::some_tokens(60, seed)].concat()).collect();
    let mut cold = Rig::new(&model, ContextParams::default(), 0);
    let mut run = |ram: u64, disk: Option<&Path>| {
        let rig = Rig::aligned(&model, ContextParams::default(), 1 << 20, CHUNK);
        let mut rig = if ram > 0 || disk.is_some() { rig.storing(tiers(ram, disk, 64 << 20)) } else { rig };
        let mut cached = Vec::new();
        for prompt in &prompts {
            let (want, got) = (cold.run(prompt), rig.run(prompt));
            same(&got, &want, true, &mut cold);
            cached.push(got.job.n_cached);
        }
        (cached, rig.stats.n_fallbacks, rig.stats.n_checkpoints)
    };
    assert_eq!(run(0, None), (vec![0; 4], 3, 0), "every fallback is counted");
    assert_eq!(run(64 << 20, None), (vec![0, 0, 64, 64], 1, 1));
    let disk = dir.path().join("prefixes");
    assert_eq!(run(0, Some(&disk)), (vec![0, 0, 64, 64], 1, 1));
    assert_eq!(run(0, Some(&disk)).0, [64; 4], "another process");
}

#[test]
fn an_engine_takes_it_and_keeps_what_is_safe() {
    let dir = tempfile::tempdir().unwrap();
    let planted = write(dir.path());
    let config = EngineConfig { n_threads: 1, n_slots: 4, n_ctx_slot: 256, chunk: CHUNK, ..EngineConfig::default() };
    let loaded = LoadedModel::load(&planted.path, &config).unwrap();
    let prompt = planted::some_tokens(100, 7);
    let counts = loaded.capture(&config, &prompt).unwrap().unwrap();
    for layer in planted.shape.usable() {
        assert_eq!(counts.row(layer).unwrap(), planted.expected_counts(&prompt, layer));
    }
    let workers = loaded.prefill_workers(&config, &planted.shape.usable()).unwrap();
    assert!(workers.iter().all(|worker| worker.runner.info().reuse == Reuse::Whole));
}
