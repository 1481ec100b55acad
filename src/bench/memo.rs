use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;

use crate::{
    bench::Probe,
    kv::ChunkCounts,
    schedule::{ModelRunner, RunError, RunnerLayer, SeqState},
    types::{SamplingParams, Slot, Token},
};

/// Prefills already computed, shared by the runs of one bench.
///
/// Every policy prefills the same prompts, cut at the same places, on the same kind of worker: a chunk is computed and
/// timed once, and stands for itself with that time in the other runs. Decode steps are always computed. Not for workers
/// that keep prefixes: what they compute depends on what came before.
#[derive(Debug, Clone, Default)]
pub struct PrefillMemo(Arc<Mutex<HashMap<Key, Chunk>>>);

/// The tokens up to the chunk's end, and the seed of the draw after it.
type Key = (Vec<Token>, u64);

#[derive(Debug, Clone)]
struct Chunk {
    took: Duration,
    counts: Option<ChunkCounts>,
    next: Option<Token>,
    export: Option<(SeqState, Duration)>,
}

impl PrefillMemo {
    /// First position, tokens and milliseconds of every chunk computed, for prompts cut every `chunk` tokens; in order.
    pub fn timings(&self, chunk: u32) -> Vec<(u32, u32, f64)> {
        let known = self.0.lock();
        let of = |((tokens, _), one): (&Key, &Chunk)| {
            let n = tokens.len() as u32;
            let pos = (n.max(1) - 1) / chunk * chunk;
            (pos, n - pos, one.took.as_secs_f64() * 1e3)
        };
        let mut timings: Vec<(u32, u32, f64)> = known.iter().map(of).collect();
        timings.sort_unstable_by(|a, b| (a.0, a.1).cmp(&(b.0, b.1)).then(a.2.total_cmp(&b.2)));
        timings
    }

    /// A prefill runner that looks here first. `probe` is told the time that a replayed chunk stands for.
    pub fn wrap(&self, probe: &Probe, runner: Box<dyn ModelRunner>) -> Box<dyn ModelRunner> {
        let slots = (0..runner.info().n_slots).map(|_| Replay::default()).collect();
        Box::new(MemoRunner { memo: self.clone(), probe: probe.clone(), runner, slots })
    }
}

struct MemoRunner {
    memo: PrefillMemo,
    probe: Probe,
    runner: Box<dyn ModelRunner>,
    slots: Vec<Replay>,
}

/// A slot's sequence as the scheduler knows it; the runner may hold only its beginning.
#[derive(Debug, Default)]
struct Replay {
    tokens: Vec<Token>,
    seed: u64,
    n_computed: usize,
}

impl MemoRunner {
    /// Brings the runner up to what the scheduler believes it holds.
    fn catch_up(&mut self, slot: Slot) -> Result<(), RunError> {
        let n_batch = self.runner.info().n_batch as usize;
        let replay = &mut self.slots[slot.index()];
        while replay.n_computed < replay.tokens.len() {
            let end = (replay.n_computed + n_batch).min(replay.tokens.len());
            let pos = replay.n_computed as u32;
            self.runner.prefill(slot, &replay.tokens[replay.n_computed..end], pos, false, None)?;
            replay.n_computed = end;
        }
        Ok(())
    }
}

impl RunnerLayer for MemoRunner {
    fn inner(&self) -> &dyn ModelRunner {
        &*self.runner
    }

    fn inner_mut(&mut self) -> &mut dyn ModelRunner {
        &mut *self.runner
    }

    fn open(&mut self, slot: Slot, sampling: &SamplingParams, generated: &[Token]) -> Result<(), RunError> {
        self.slots[slot.index()] = Replay { seed: sampling.seed, ..Replay::default() };
        self.runner.open(slot, sampling, generated)
    }

    fn prefill(
        &mut self,
        slot: Slot,
        tokens: &[Token],
        pos: u32,
        last: bool,
        counts: Option<&mut ChunkCounts>,
    ) -> Result<Option<Token>, RunError> {
        let replay = &mut self.slots[slot.index()];
        let key = ([replay.tokens.as_slice(), tokens].concat(), replay.seed);
        let known = self.memo.0.lock().get(&key).cloned();
        if let Some(chunk) = known
            && chunk.next.is_some() == last
        {
            if let (Some(counts), Some(chunk)) = (counts, &chunk.counts) {
                counts.copy_from(chunk);
            }
            replay.tokens.extend_from_slice(tokens);
            self.probe.add_replayed(chunk.took);
            return Ok(chunk.next);
        }
        self.catch_up(slot)?;
        let mut chunk_counts = counts.as_ref().map(|counts| ChunkCounts::cleared(counts));
        let start = self.probe.stopwatch().start();
        let next = self.runner.prefill(slot, tokens, pos, last, chunk_counts.as_mut())?;
        let took = start.elapsed();
        if let (Some(counts), Some(chunk)) = (counts, &chunk_counts) {
            counts.copy_from(chunk);
        }
        let replay = &mut self.slots[slot.index()];
        replay.tokens.extend_from_slice(tokens);
        replay.n_computed = replay.tokens.len();
        self.memo.0.lock().insert(key, Chunk { took, counts: chunk_counts, next, export: None });
        Ok(next)
    }

    fn export(&mut self, slot: Slot) -> Result<SeqState, RunError> {
        let replay = &self.slots[slot.index()];
        let key = (replay.tokens.clone(), replay.seed);
        let known = self.memo.0.lock().get(&key).and_then(|chunk| chunk.export.clone());
        if let Some((state, took)) = known {
            self.probe.add_replayed(took);
            // Bytes of its own, so that the hand-off is one of its own.
            return Ok(SeqState { n_tokens: state.n_tokens, bytes: Arc::from(&*state.bytes) });
        }
        self.catch_up(slot)?;
        let start = self.probe.stopwatch().start();
        let state = self.runner.export(slot)?;
        let took = start.elapsed();
        if let Some(chunk) = self.memo.0.lock().get_mut(&key) {
            chunk.export = Some((state.clone(), took));
        }
        Ok(state)
    }

    fn relocate(&mut self, from: Slot, to: Slot) -> Result<(), RunError> {
        self.slots.swap(from.index(), to.index());
        self.runner.relocate(from, to)
    }

    fn close(&mut self, slot: Slot) -> Result<(), RunError> {
        self.slots[slot.index()] = Replay::default();
        self.runner.close(slot)
    }

    fn keep(&mut self, slot: Slot, _: u32) -> Result<(), RunError> {
        RunnerLayer::close(self, slot)?;
        Err(RunError::Restored("replayed prefills leave no keys and values".to_owned()))
    }

    fn copy_prefix(&mut self, _: Slot, _: Slot, _: u32) -> Result<(), RunError> {
        Err(RunError::Restored("replayed prefills leave no keys and values".to_owned()))
    }
}
