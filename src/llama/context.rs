//! One worker's llama.cpp context: runs batches, gives logits, moves sequences in and out.
//!
//! Never trusts a length or a return value of llama.cpp: what it was asked for is read back, what it took is verified.

use std::{
    ffi::c_void,
    fmt,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use llama_cpp_sys_2 as sys;

use super::{
    batch::Batch,
    error::{DecodeError, LlamaError},
    guard, logging,
    model::Model,
    params::{self, ContextParams, setting},
    pool::Pool,
    tap::{Tap, TapRows},
};

/// A context of one model. It may move between threads but is used by one at a time:
///
/// ```compile_fail
/// fn needs_sync<T: Sync>() {}
/// needs_sync::<eldr::llama::Context>();
/// ```
///
/// ```
/// fn needs_send<T: Send>() {}
/// needs_send::<eldr::llama::Context>();
/// fn needs_both<T: Send + Sync>() {}
/// needs_both::<eldr::llama::Model>();
/// ```
pub struct Context {
    // Dropped in this order, after `drop` has freed `raw`: what llama.cpp points to, then the model.
    raw: NonNull<sys::llama_context>,
    tap: Option<Tap>,
    pool: Option<Pool>,
    abort: Option<Arc<AtomicBool>>,
    model: Model,
    params: ContextParams,
    /// By row of the last batch: its logits are there.
    outputs: Vec<bool>,
}

// SAFETY: llama.cpp ties a context to no thread; `&mut self` on everything that computes keeps calls apart.
unsafe impl Send for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: ours, not used again; the tap and the abort flag it points to are dropped after it.
        unsafe { sys::llama_free(self.raw.as_ptr()) };
    }
}

impl Context {
    /// Creates a context. Its settings are read back and [`Context::params`] holds what llama.cpp made of them.
    ///
    /// Errors: settings that cannot work, a tap on a dense model, memory that is not there.
    pub fn new(model: &Model, params: &ContextParams) -> Result<Self, LlamaError> {
        let mut params = params.clone();
        params::check(&params)?;
        // llama.cpp aborts when a context cannot hold one output a sequence.
        params.n_batch = params.n_batch.max(params.n_slots);
        params.n_outputs = params.n_outputs.clamp(params.n_slots, params.n_batch);
        params::check_memory(model, &params)?;
        let tap = match (params.tap, model.moe_shape()) {
            (true, Some(shape)) => Some(Tap::new(shape)),
            (true, None) => {
                return Err(setting(&params, "a dense model has no experts to tap: leave the tap off"));
            }
            (false, _) => None,
        };
        let raw_params = params::raw_params(&params, tap.as_ref());
        logging::clear_errors();
        let created = model.create_context(&raw_params);
        let reason = logging::take_errors();
        let raw = match created {
            Ok(Some(raw)) => raw,
            Err(caught) if caught.is_no_memory() => return Err(params::out_of_memory(model, &params)),
            Ok(None) if reason.contains("alloc") => return Err(params::out_of_memory(model, &params)),
            Ok(None) => return Err(LlamaError::Context { name: params.name, reason }),
            Err(caught) => return Err(LlamaError::Context { name: params.name, reason: caught.to_string() }),
        };
        let mut context = Self { raw, tap, pool: None, abort: None, model: model.clone(), params, outputs: Vec::new() };
        context.read_back()?;
        if let Some(reason) = model.failure() {
            return Err(LlamaError::Context { name: context.params.name.clone(), reason });
        }
        if !context.params.cpus.is_empty() && !model.is_foreseen() {
            let Self { params, raw, .. } = &context;
            // SAFETY: the context is open, and `pool` is dropped after `drop` has freed it.
            let pool = unsafe { Pool::attach(raw.as_ptr(), &params.cpus, params.n_threads) };
            context.pool = Some(pool.map_err(|reason| setting(&context.params, &reason))?);
        }
        Ok(context)
    }

    /// Adopts what llama.cpp changed, and refuses what would be too little.
    fn read_back(&mut self) -> Result<(), LlamaError> {
        let raw = self.raw.as_ptr();
        // SAFETY: the context is open.
        if unsafe { sys::llama_get_memory(raw) }.is_null() {
            return Err(setting(&self.params, "the model keeps no memory of a sequence: it cannot generate text"));
        }
        // SAFETY: the context is open.
        let n_seq_max = unsafe { sys::llama_n_seq_max(raw) };
        if n_seq_max < self.params.n_slots {
            return Err(setting(&self.params, &format!("llama.cpp allows {n_seq_max} slots only")));
        }
        // SAFETY: the context is open.
        self.params.n_batch = unsafe { sys::llama_n_batch(raw) };
        // SAFETY: the context is open.
        self.params.n_ubatch = unsafe { sys::llama_n_ubatch(raw) };
        // SAFETY: the context is open.
        let n_ctx_seq = unsafe { sys::llama_n_ctx_seq(raw) };
        let n_ctx_slot = if self.params.kv_unified { n_ctx_seq / self.params.n_slots } else { n_ctx_seq };
        if n_ctx_slot < self.params.n_ctx_slot {
            return Err(setting(&self.params, &format!("llama.cpp allows {n_ctx_slot} tokens a slot only")));
        }
        self.params.n_ctx_slot = n_ctx_slot;
        Ok(())
    }

    /// The settings, as llama.cpp took them.
    pub fn params(&self) -> &ContextParams {
        &self.params
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Runs a batch. Its logits are there until the next batch.
    pub fn decode(&mut self, batch: &Batch) -> Result<(), DecodeError> {
        self.outputs.clear();
        self.check_batch(batch)?;
        let n_tokens = i32::try_from(batch.len()).expect("a checked batch is within n_batch");
        let mut count = vec![1i32; batch.len()];
        let mut sequences = batch.sequences.clone();
        let base = sequences.as_mut_ptr();
        let mut sequence_of: Vec<*mut i32> = (0..batch.len()).map(|i| base.wrapping_add(i)).collect();
        let raw_batch = sys::llama_batch {
            n_tokens,
            token: batch.tokens.as_ptr().cast_mut(),
            embd: ptr::null_mut(),
            pos: batch.positions.as_ptr().cast_mut(),
            n_seq_id: count.as_mut_ptr(),
            seq_id: sequence_of.as_mut_ptr(),
            logits: batch.wanted.as_ptr().cast_mut(),
        };
        let mut result = 0;
        logging::clear_errors();
        // SAFETY: every array holds as many entries as the batch has tokens; llama.cpp copies them and writes none.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_decode(self.raw.as_ptr(), &raw const raw_batch, &raw mut result, message, size)
        })
        .map_err(|e| DecodeError::exception(format!("{}: {e}", self.params.name)))?;
        if result != 0 {
            return Err(DecodeError::from_code(result, batch.len(), &logging::take_errors()));
        }
        self.outputs.extend(batch.wanted.iter().map(|&w| w != 0));
        Ok(())
    }

    /// Runs a batch and hands each wanted layer's picks to `sink`, after the whole batch is known to be good.
    ///
    /// The batch must be one whose order llama.cpp keeps ([`Batch::keeps_order`]). The model's last layer is handed out
    /// only when the logits of all rows are wanted, as in a decode step. A failure of the tap leaves the batch run and
    /// its logits good ([`DecodeFailure::Tap`](super::DecodeFailure::Tap)).
    pub fn decode_tapped(&mut self, batch: &Batch, sink: &mut dyn FnMut(TapRows<'_>)) -> Result<(), DecodeError> {
        let Some(tap) = &mut self.tap else {
            return Err(DecodeError::refused(format!("{} was made without a tap", self.params.name)));
        };
        if !batch.keeps_order() {
            return Err(DecodeError::refused(
                "picks can be told apart only in a batch of one sequence, or of one token a sequence in ascending order"
                    .to_owned(),
            ));
        }
        tap.start();
        let ran = self.decode(batch);
        let tap = self.tap.as_mut().expect("the tap is still there");
        tap.stop();
        ran?;
        tap.deliver(batch.len(), sink).map_err(|fault| DecodeError::tap(format!("{}: {fault}", self.params.name)))
    }

    /// Layers the tap reads from now on, as rows of the model's [`MoeShape::layers`](crate::types::MoeShape::layers);
    /// all of them before the first call. Errors: no tap, or no such row.
    pub fn set_tap_layers(&mut self, rows: &[u32]) -> Result<(), LlamaError> {
        let Some(tap) = &mut self.tap else { return Err(setting(&self.params, "it was made without a tap")) };
        let limit = tap.n_rows();
        if let Some(&row) = rows.iter().find(|&&row| row >= limit) {
            let (value, limit) = (i64::from(row), i64::from(limit));
            return Err(LlamaError::OutOfRange { what: "MoE layer", value, limit });
        }
        tap.set_layers(rows);
        Ok(())
    }

    /// The tap reads what the gate says of every expert too, from now on. Errors: no tap.
    pub fn tap_gates(&mut self) -> Result<(), LlamaError> {
        match &mut self.tap {
            Some(tap) => tap.read_gates(),
            None => return Err(setting(&self.params, "it was made without a tap")),
        }
        Ok(())
    }

    /// Parts the last tapped batch was computed in; 0 without a tap.
    pub fn n_ubatches(&mut self) -> u32 {
        self.tap.as_mut().map_or(0, Tap::n_ubatches)
    }

    /// The logits of row `i` of the last batch, one for each token of the vocabulary.
    ///
    /// Panics if that row did not ask for logits or the batch did not run.
    pub fn logits(&self, i: usize) -> &[f32] {
        assert!(
            self.outputs.get(i).copied().unwrap_or(false),
            "row {i} of {} has no logits: it was not asked for them, or its batch failed",
            self.outputs.len()
        );
        let mut row = ptr::null_mut();
        let index = i32::try_from(i).expect("a row of a batch");
        // SAFETY: the context is open and not computing; waits for the last batch.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_logits(self.raw.as_ptr(), index, &raw mut row, message, size)
        })
        .unwrap_or_else(|e| panic!("logits of row {i}: {e}"));
        assert!(!row.is_null(), "llama.cpp has no logits for row {i}: {}", logging::take_reason());
        // SAFETY: llama.cpp keeps a vocabulary of floats a row until the next batch, which needs `&mut self`.
        unsafe { std::slice::from_raw_parts(row, self.model.n_vocab()) }
    }

    /// A batch stops and fails with [`DecodeFailure::Aborted`](super::DecodeFailure::Aborted) soon after the flag is
    /// set. It works on the CPU only: a GPU finishes the batch first.
    pub fn set_abort(&mut self, flag: Option<Arc<AtomicBool>>) {
        let (callback, data): (sys::ggml_abort_callback, _) = match &flag {
            Some(flag) => (Some(is_aborted), Arc::as_ptr(flag).cast_mut().cast::<c_void>()),
            None => (None, ptr::null_mut()),
        };
        // SAFETY: the flag is kept until another one is set or the context is freed.
        unsafe { sys::llama_set_abort_callback(self.raw.as_ptr(), callback, data) };
        self.abort = flag;
    }

    pub(super) fn raw(&self) -> *mut sys::llama_context {
        self.raw.as_ptr()
    }

    pub(super) fn check_seq(&self, seq: u32) -> Result<i32, LlamaError> {
        let limit = self.params.n_slots;
        if seq < limit {
            return Ok(seq.cast_signed());
        }
        Err(LlamaError::OutOfRange { what: "sequence", value: i64::from(seq), limit: i64::from(limit) })
    }

    /// Everything that llama.cpp would assert, or index memory with.
    fn check_batch(&self, batch: &Batch) -> Result<(), DecodeError> {
        let params = &self.params;
        let refuse = |what: &str| Err(DecodeError::refused(format!("{}: {what}", params.name)));
        if batch.is_empty() {
            return refuse("the batch is empty");
        }
        if batch.len() > params.n_batch as usize {
            return refuse(&format!("a batch of {} tokens is over its limit of {}", batch.len(), params.n_batch));
        }
        if batch.n_outputs() > params.n_outputs as usize {
            return refuse(&format!("{} rows want logits, over its limit of {}", batch.n_outputs(), params.n_outputs));
        }
        let n_vocab = i64::from(self.model.facts().n_vocab);
        if let Some(token) = batch.tokens.iter().find(|&&t| !(0..n_vocab).contains(&i64::from(t))) {
            return refuse(&format!("token {token} is not in the vocabulary of {n_vocab}"));
        }
        if let Some(seq) = batch.sequences.iter().find(|&&s| s.cast_unsigned() >= params.n_slots) {
            return refuse(&format!("sequence {seq} is not below its {} slots", params.n_slots));
        }
        if let Some(pos) = batch.positions.iter().find(|&&p| p.cast_unsigned() >= params.n_ctx_slot) {
            return refuse(&format!("position {pos} is past the end of a slot of {} tokens", params.n_ctx_slot));
        }
        Ok(())
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({}, {:?})", self.params.name, self.model)
    }
}

unsafe extern "C" fn is_aborted(flag: *mut c_void) -> bool {
    // SAFETY: the context owns a reference to the flag for as long as this is set.
    unsafe { &*flag.cast::<AtomicBool>() }.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::{
        DecodeFailure, KvType,
        testing::{batch, bits, context, model, prefill, prompt},
    };

    fn tapped(params: &ContextParams) -> Context {
        context(&ContextParams { tap: true, ..params.clone() })
    }

    /// Per delivered row: the layer and every token's picks.
    fn picks(context: &mut Context, batch: &Batch) -> Vec<(u32, Vec<u32>)> {
        let mut seen = Vec::new();
        context.decode_tapped(batch, &mut |rows| seen.push((rows.layer, rows.experts.to_vec()))).expect("a tapped run");
        seen
    }

    #[test]
    fn every_layer_but_the_last_counts_every_prompt_token() {
        let tokens = prompt(100);
        let seen = picks(&mut tapped(&ContextParams::default()), &batch(&tokens, 0, 0, false));
        assert_eq!(seen.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        for (layer, experts) in &seen {
            assert_eq!(experts.len(), 400, "layer {layer}");
            assert!(experts.chunks(4).all(|k| (0..4).all(|i| !k[i + 1..].contains(&k[i]))), "layer {layer}: distinct");
        }
        let all = picks(&mut tapped(&ContextParams::default()), &batch(&tokens, 0, 0, true));
        assert_eq!(all.last().map(|(layer, experts)| (*layer, experts.len())), Some((5, 400)));
        assert_eq!(all[..5], seen[..]);
    }

    #[test]
    fn picks_do_not_depend_on_ubatches_or_streams() {
        let tokens = prompt(100);
        let expected = picks(&mut tapped(&ContextParams::default()), &batch(&tokens, 0, 0, false));
        for (n_slots, kv_unified) in [(1, true), (4, false)] {
            let params = ContextParams { n_ubatch: 16, n_slots, kv_unified, ..ContextParams::default() };
            let mut context = tapped(&params);
            assert_eq!(picks(&mut context, &batch(&tokens, 0, n_slots - 1, false)), expected, "{params:?}");
            assert_eq!(context.n_ubatches(), 7);
        }
    }

    #[test]
    fn a_decode_step_knows_each_sequences_picks() {
        let mut context = tapped(&ContextParams { n_slots: 4, ..ContextParams::default() });
        let prompts: Vec<_> = (0..4).map(|i| prompt(40)[i..20 + 3 * i].to_vec()).collect();
        for (seq, tokens) in prompts.iter().enumerate() {
            prefill(&mut context, tokens, seq as u32);
        }
        let step = |seqs: &[u32]| {
            let mut batch = Batch::new(4);
            for &seq in seqs {
                batch.push(70 + seq.cast_signed(), prompts[seq as usize].len() as u32, seq, true).expect("room");
            }
            batch
        };
        let together = picks(&mut context, &step(&[0, 1, 3]));
        assert_eq!(context.n_ubatches(), 2, "a gap in the sequence ids cuts the batch");
        assert_eq!(together.len(), 6, "every row wants logits, so the last layer is whole");
        for (i, seq) in [0u32, 1, 3].into_iter().enumerate() {
            context.seq_truncate(seq, prompts[seq as usize].len() as u32).expect("dropped again");
            let alone = picks(&mut context, &step(&[seq]));
            for ((_, many), (_, one)) in together.iter().zip(&alone) {
                assert_eq!(&many[4 * i..4 * i + 4], &one[..]);
            }
        }
    }

    #[test]
    fn batches_whose_order_is_not_proven_are_refused_untouched() {
        let mut context = tapped(&ContextParams { n_slots: 2, ..ContextParams::default() });
        let mut mixed = Batch::new(3);
        for (position, seq) in [(0, 0), (1, 0), (0, 1)] {
            mixed.push(5, position, seq, true).expect("room");
        }
        let error = context.decode_tapped(&mixed, &mut |_| panic!("nothing is handed out")).expect_err("refused");
        assert!(error.restored && error.failure == DecodeFailure::InvalidBatch);
        assert_eq!(context.seq_pos_max(0), Ok(None));
        context.decode(&mixed).expect("without the tap any order runs");
    }

    #[test]
    fn only_wanted_layers_are_handed_out_and_the_tap_changes_no_logit() {
        let tokens = prompt(60);
        let plain = prefill(&mut context(&ContextParams::default()), &tokens, 0);
        let mut context = tapped(&ContextParams::default());
        let off = prefill(&mut context, &tokens, 0);
        context.clear_seq(0).expect("emptied");
        context.set_tap_layers(&[1, 4]).expect("two rows");
        let seen = picks(&mut context, &batch(&tokens, 0, 0, false));
        assert_eq!(seen.iter().map(|(layer, _)| *layer).collect::<Vec<_>>(), [1, 4]);
        assert_eq!(bits(context.logits(59)), bits(&plain));
        assert_eq!(bits(&off), bits(&plain));
        assert!(context.set_tap_layers(&[6]).is_err());
    }

    #[test]
    fn what_llama_cpp_would_assert_is_refused() {
        let mut context =
            Context::new(model(), &ContextParams { n_slots: 2, n_batch: 8, n_ubatch: 8, ..ContextParams::default() })
                .expect("a context");
        let one = |token: i32, position: u32, seq: u32| {
            let mut batch = Batch::new(1);
            batch.push(token, position, seq, true).expect("room");
            batch
        };
        for bad in [
            Batch::new(1),
            one(-1, 0, 0),
            one(4096, 0, 0),
            one(1, 1024, 0),
            one(1, 0, 2),
            batch(&[1; 9], 0, 0, false),
            batch(&[1; 3], 0, 0, true),
        ] {
            let error = context.decode(&bad).expect_err("refused");
            assert!(error.restored && error.failure == DecodeFailure::InvalidBatch, "{error}");
        }
        assert_eq!(context.seq_pos_max(0), Ok(None));
        context.decode(&one(1, 0, 0)).expect("a good batch still runs");
        let error = context.decode(&one(1, 5, 0)).expect_err("a gap in the positions");
        assert_eq!((error.code, error.restored), (-1, true));
        assert!(error.message.contains("position"), "{error}");
    }

    #[test]
    fn one_stream_is_shared_out_in_equal_slots() {
        let params = ContextParams { n_slots: 2, kv_unified: true, ..ContextParams::default() };
        let mut context = context(&params);
        let n_ctx_slot = context.params().n_ctx_slot;
        assert_eq!(n_ctx_slot, 256);
        prefill(&mut context, &vec![9; 256], 0);
        prefill(&mut context, &vec![9; 200], 1);
        let error = context.decode(&batch(&[9; 57], 200, 1, false)).expect_err("slot 1 is too short");
        assert!(error.restored);
        assert_eq!(context.seq_pos_max(1), Ok(Some(199)));
    }

    #[test]
    fn the_abort_flag_stops_a_batch() {
        let mut context = context(&ContextParams::default());
        let flag = Arc::new(AtomicBool::new(true));
        context.set_abort(Some(Arc::clone(&flag)));
        let error = context.decode(&batch(&prompt(100), 0, 0, false)).expect_err("aborted");
        assert_eq!((error.failure, error.restored), (DecodeFailure::Aborted, false));
        context.clear_seq(0).expect("emptied");
        flag.store(false, Ordering::Relaxed);
        prefill(&mut context, &prompt(100), 0);
    }

    #[test]
    fn settings_that_cannot_work_say_so() {
        let error = |params: ContextParams| Context::new(model(), &params).expect_err("refused").to_string();
        let base = ContextParams { name: "decode 3".to_owned(), ..ContextParams::default() };
        assert!(error(ContextParams { n_slots: 0, ..base.clone() }).contains("0 slots"));
        assert!(error(ContextParams { n_slots: 257, ..base.clone() }).contains("257 slots"));
        assert!(error(ContextParams { type_v: KvType::Q8_0, ..base.clone() }).contains("flash attention"));
        let huge = error(ContextParams { n_slots: 256, n_ctx_slot: 8_000_000, ..base.clone() });
        assert!(huge.contains("decode 3") && huge.contains("MiB"), "{huge}");
        let wide = error(ContextParams { n_slots: 256, n_ctx_slot: 9_000_000, ..base });
        assert!(wide.contains("31 bits"), "{wide}");
    }

    #[test]
    fn settings_are_read_back() {
        let params = ContextParams { n_slots: 3, n_ctx_slot: 100, n_batch: 2, n_ubatch: 2, ..ContextParams::default() };
        let context = Context::new(model(), &params).expect("a context");
        assert_eq!((context.params().n_ctx_slot, context.params().n_batch), (256, 3));
        assert_eq!(context.params().n_outputs, 3);
    }

    #[test]
    #[should_panic(expected = "has no logits")]
    fn logits_of_a_row_that_did_not_ask_are_a_bug() {
        let mut context = context(&ContextParams::default());
        context.decode(&batch(&prompt(4), 0, 0, false)).expect("a prefill");
        context.logits(2);
    }
}
