//! A context's sequences: how far they reach, dropping and copying them, and their state as bytes.
//!
//! Never leaves a sequence half taken: what llama.cpp did not restore whole is emptied again and refused.

use super::{context::Context, error::LlamaError, guard, logging};

use llama_cpp_sys_2 as sys;

impl Context {
    /// The first position kept of a sequence; above 0 only in sliding windows and recurrent models. `None` when empty.
    pub fn seq_pos_min(&self, seq: u32) -> Result<Option<u32>, LlamaError> {
        let seq = self.check_seq(seq)?;
        // SAFETY: the sequence is below the context's limit.
        Ok(u32::try_from(unsafe { sys::llama_memory_seq_pos_min(self.memory(), seq) }).ok())
    }

    /// The last position of a sequence. `None` when empty.
    pub fn seq_pos_max(&self, seq: u32) -> Result<Option<u32>, LlamaError> {
        let seq = self.check_seq(seq)?;
        // SAFETY: the sequence is below the context's limit.
        Ok(u32::try_from(unsafe { sys::llama_memory_seq_pos_max(self.memory(), seq) }).ok())
    }

    /// Drops a sequence's tokens from position `from` on. Errors: the model cannot drop part of a sequence (recurrent
    /// layers, or a sliding window that has moved on): empty it and run the prompt again.
    pub fn seq_truncate(&mut self, seq: u32, from: u32) -> Result<(), LlamaError> {
        let id = self.check_seq(seq)?;
        if self.seq_pos_max(seq)?.is_none_or(|last| last < from) {
            return Ok(());
        }
        let reason = "this model cannot drop part of it: empty it and run the prompt again".to_owned();
        if self.remove(id, i32::try_from(from).unwrap_or(i32::MAX), seq)? {
            return Ok(());
        }
        Err(LlamaError::Sequence { seq, reason })
    }

    /// Empties a sequence.
    pub fn clear_seq(&mut self, seq: u32) -> Result<(), LlamaError> {
        let id = self.check_seq(seq)?;
        if self.remove(id, -1, seq)? {
            return Ok(());
        }
        Err(LlamaError::Sequence { seq, reason: "llama.cpp did not empty it".to_owned() })
    }

    /// Copies a whole sequence over another one, unchanged to the bit. With one stream for all it costs nothing;
    /// otherwise the state goes through host memory.
    pub fn seq_cp(&mut self, from: u32, to: u32) -> Result<(), LlamaError> {
        let (src, dst) = (self.check_seq(from)?, self.check_seq(to)?);
        if src == dst {
            return Ok(());
        }
        self.clear_seq(to)?;
        let Some(last) = self.seq_pos_max(from)? else { return Ok(()) };
        if self.params().kv_unified {
            // SAFETY: the context is open and both sequences are in its only stream.
            return guard::call(|message, size| unsafe {
                guard::eldr_guard_seq_share(self.raw(), src, dst, message, size)
            })
            .map_err(|e| LlamaError::Sequence { seq: from, reason: e.to_string() });
        }
        let state = self.state_get(from)?;
        self.state_set(to, &state, last + 1)
    }

    /// A sequence's keys and values, in llama.cpp's own format.
    pub fn state_get(&self, seq: u32) -> Result<Vec<u8>, LlamaError> {
        let id = self.check_seq(seq)?;
        let failed = |reason: String| LlamaError::StateGet { seq, reason };
        let mut need = 0;
        logging::clear_errors();
        // SAFETY: the context is open and the sequence below its limit.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_state_size(self.raw(), id, &raw mut need, message, size)
        })
        .map_err(|e| failed(e.to_string()))?;
        let mut state = Vec::new();
        state.try_reserve_exact(need).map_err(|_| failed(format!("no memory for {need} bytes")))?;
        state.resize(need, 0u8);
        let mut written = 0;
        // SAFETY: as above; the buffer holds `need` bytes.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_state_get(self.raw(), state.as_mut_ptr(), need, id, &raw mut written, message, size)
        })
        .map_err(|e| failed(e.to_string()))?;
        if written == need && need > 0 {
            return Ok(state);
        }
        Err(failed(format!("{written} of {need} bytes came: {}", logging::take_reason())))
    }

    /// Replaces a sequence by a state of `n_tokens` tokens that [`Context::state_get`] gave, here or in a context with
    /// the same [`Context::fingerprint`]. Every byte must be taken and every position be there; otherwise the sequence
    /// is empty and the error says why.
    pub fn state_set(&mut self, seq: u32, state: &[u8], n_tokens: u32) -> Result<(), LlamaError> {
        let id = self.check_seq(seq)?;
        self.clear_seq(seq)?;
        let mut taken = 0;
        logging::clear_errors();
        // SAFETY: the context is open, the sequence below its limit, and the length is the slice's.
        let set = guard::call(|message, size| unsafe {
            guard::eldr_guard_state_set(self.raw(), state.as_ptr(), state.len(), id, &raw mut taken, message, size)
        });
        let problem = match set {
            Err(e) => e.to_string(),
            Ok(()) if taken == 0 => logging::take_reason(),
            Ok(()) if taken != state.len() => format!("{taken} of {} bytes were taken", state.len()),
            Ok(()) => match self.missing(seq, n_tokens)? {
                None => return Ok(()),
                Some(problem) => problem,
            },
        };
        self.clear_seq(seq)?;
        Err(LlamaError::StateSet { name: self.params().name.clone(), n_tokens, reason: problem })
    }

    /// Whether the model's memory can drop the end of a sequence at all: recurrent layers keep one state, of its last
    /// token. A sliding window drops as much as it has not moved past; [`Context::verify`] tells.
    pub fn cuts_sequences(&self) -> bool {
        let facts = self.model().facts();
        !facts.recurrent && !facts.hybrid
    }

    /// Whether it can drop the end of a sequence wherever it is cut.
    pub fn cuts_anywhere(&self) -> bool {
        self.cuts_sequences() && (self.model().facts().n_swa == 0 || self.params().swa_full)
    }

    /// Whether a sequence can be cut to its first `n_tokens` tokens, with everything the next one looks at still there.
    pub fn reaches(&self, seq: u32, n_tokens: u32) -> bool {
        let n_swa = self.model().facts().n_swa;
        if self.cuts_sequences() && n_swa == 0 {
            return true;
        }
        match (self.seq_pos_min(seq), self.seq_pos_max(seq)) {
            (Ok(Some(first)), Ok(Some(_))) if self.cuts_sequences() => first <= (n_tokens + 1).saturating_sub(n_swa),
            (_, Ok(Some(last))) => last + 1 == n_tokens,
            _ => false,
        }
    }

    /// Checks that a sequence ends with token `n_tokens - 1` and that everything the next one looks at is there.
    pub fn verify(&self, seq: u32, n_tokens: u32) -> Result<(), LlamaError> {
        match self.missing(seq, n_tokens)? {
            None => Ok(()),
            Some(problem) => Err(LlamaError::Sequence { seq, reason: format!("{problem}, not {n_tokens} tokens") }),
        }
    }

    /// Checks, beyond [`Context::verify`], that the cells of a sequence's exported state are positions `0..n_tokens`, each
    /// once, or that an empty one has none. Slow: it exports the sequence. Recurrent layers have no cells to look at.
    pub fn check_seq_cells(&self, seq: u32, n_tokens: u32) -> Result<(), LlamaError> {
        let wrong = |reason: String| Err(LlamaError::Sequence { seq, reason });
        if n_tokens == 0 {
            return match self.seq_pos_max(seq)? {
                None => Ok(()),
                Some(last) => wrong(format!("positions to {last} are there, not 0 tokens")),
            };
        }
        self.verify(seq, n_tokens)?;
        let facts = self.model().facts();
        if facts.recurrent || facts.hybrid {
            return Ok(());
        }
        match first_cells(&self.state_get(seq)?, seq) {
            Some(mut cells) => {
                cells.sort_unstable();
                if cells.iter().copied().eq(0..n_tokens) {
                    return Ok(());
                }
                wrong(format!("the exported cells are not positions 0 to {} but {cells:?}", n_tokens - 1))
            }
            // Cells with more than one position each, say: the positions' ends have been looked at.
            None => Ok(()),
        }
    }

    /// For tests: moves all positions of a sequence by `by`, as another user of the context could; what falls below 0 is
    /// gone. False, and nothing done, where the model's memory can not be shifted.
    #[doc(hidden)]
    pub fn shift_seq(&mut self, seq: u32, by: i32) -> Result<bool, LlamaError> {
        let id = self.check_seq(seq)?;
        // SAFETY: the context is open.
        let can = unsafe { sys::llama_memory_can_shift(self.memory()) };
        if can {
            // SAFETY: the context is open, and the sequence below its limit.
            unsafe { sys::llama_memory_seq_add(self.memory(), id, 0, -1, by) };
        }
        Ok(can)
    }

    /// What is wrong with the positions of a sequence that should hold `n_tokens` tokens.
    fn missing(&self, seq: u32, n_tokens: u32) -> Result<Option<String>, LlamaError> {
        let facts = self.model().facts();
        let (first, last) = (self.seq_pos_min(seq)?, self.seq_pos_max(seq)?);
        // The next token, at position n_tokens, looks at as many positions as the window is wide, itself among them; a
        // recurrent state keeps the last position only.
        let latest_first = match facts.n_swa {
            _ if facts.recurrent || facts.hybrid => n_tokens.saturating_sub(1),
            0 => 0,
            window => (n_tokens + 1).saturating_sub(window),
        };
        let whole = last.map(|p| p + 1) == Some(n_tokens) && first.is_some_and(|p| p <= latest_first);
        Ok((!whole).then(|| match (first, last) {
            (Some(first), Some(last)) => format!("positions {first} to {last} are there"),
            _ => "no position is there".to_owned(),
        }))
    }

    /// Name and value of everything that must be equal for two contexts to exchange sequences, in a fixed order.
    pub fn fingerprint(&self) -> Vec<(&'static str, String)> {
        let params = self.params();
        let streams = if params.kv_unified { 1 } else { params.n_slots };
        let swa = match (self.model().facts().n_swa, params.swa_full) {
            (0, _) => "none",
            (_, true) => "full",
            (_, false) => "window",
        };
        let flash_attn = if params.flash_attn { "on" } else { "off" };
        vec![
            ("model", self.model().fingerprint().to_owned()),
            ("KV streams", streams.to_string()),
            ("key type", params.type_k.to_string()),
            ("value type", params.type_v.to_string()),
            ("flash attention", flash_attn.to_owned()),
            ("sliding window cache", swa.to_owned()),
        ]
    }

    fn remove(&mut self, id: i32, from: i32, seq: u32) -> Result<bool, LlamaError> {
        let mut removed = false;
        // SAFETY: the context is open and the sequence below its limit.
        guard::call(|message, size| unsafe {
            guard::eldr_guard_seq_rm(self.raw(), id, from, -1, &raw mut removed, message, size)
        })
        .map_err(|e| LlamaError::Sequence { seq, reason: e.to_string() })?;
        Ok(removed)
    }

    fn memory(&self) -> sys::llama_memory_t {
        // SAFETY: the context is open, and it was checked to have a memory when it was made.
        unsafe { sys::llama_get_memory(self.raw()) }
    }
}

/// The positions of the first cells in the state of sequence `seq` (`llama_context::state_seq_get_data` and
/// `llama_kv_cache::state_write` of the pinned revision: a magic number, the sequence, the number of streams, and for each
/// its cells; a cell is its position, the number of its sequences, and these). With a sliding window, the first ones are
/// those of the layers without it. None if the cells are of another kind.
fn first_cells(state: &[u8], seq: u32) -> Option<Vec<u32>> {
    let (words, _) = state.as_chunks::<4>();
    let mut words = words.iter().map(|&word| u32::from_le_bytes(word));
    let n_streams = words.nth(2)?;
    let n_cells = (0..n_streams).find_map(|_| words.next().filter(|&n| n > 0))?;
    let mut cells = Vec::new();
    for _ in 0..n_cells {
        cells.push(words.next()?);
        if (words.next()?, words.next()?) != (1, seq) {
            return None;
        }
    }
    Some(cells)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::{
        ContextParams, KvType,
        testing::{batch, bits, context, prefill, prompt},
    };

    fn next(context: &mut Context, seq: u32, position: u32) -> Vec<u32> {
        context.decode(&batch(&[77], position, seq, false)).expect("a step");
        bits(context.logits(0))
    }

    #[test]
    fn a_moved_sequence_goes_on_bit_for_bit() {
        let tokens = prompt(90);
        let params = ContextParams { n_slots: 3, ..ContextParams::default() };
        let mut here = context(&params);
        let mut there = context(&params);
        prefill(&mut here, &tokens, 1);
        let state = here.state_get(1).expect("a state");
        there.state_set(2, &state, 90).expect("taken");
        assert_eq!(there.seq_pos_min(2), Ok(Some(0)));
        assert_eq!(there.seq_pos_max(2), Ok(Some(89)));
        here.seq_cp(1, 0).expect("copied");
        let stayed = next(&mut here, 1, 90);
        assert_eq!(next(&mut there, 2, 90), stayed);
        assert_eq!(next(&mut here, 0, 90), stayed);
    }

    #[test]
    fn a_state_that_does_not_fit_is_refused_and_the_sequence_is_empty() {
        let tokens = prompt(50);
        let base = ContextParams { n_slots: 2, ..ContextParams::default() };
        let mut here = context(&base);
        prefill(&mut here, &tokens, 0);
        let state = here.state_get(0).expect("a state");
        for (setting, params) in [
            ("KV streams", ContextParams { n_slots: 3, ..base.clone() }),
            ("KV streams", ContextParams { kv_unified: true, ..base.clone() }),
            ("key type", ContextParams { type_k: KvType::F32, ..base.clone() }),
            ("flash attention", ContextParams { flash_attn: true, ..base.clone() }),
        ] {
            let mut there = context(&params);
            prefill(&mut there, &tokens[..7], 1);
            let error = there.state_set(1, &state, 50).expect_err(setting);
            assert!(matches!(error, LlamaError::StateSet { n_tokens: 50, .. }), "{error}");
            assert_eq!(there.seq_pos_max(1), Ok(None), "{setting}: nothing may be left");
            let differs: Vec<_> = here
                .fingerprint()
                .into_iter()
                .zip(there.fingerprint())
                .filter(|(a, b)| a != b)
                .map(|(a, _)| a.0)
                .collect();
            assert_eq!(differs, [setting]);
        }
    }

    #[test]
    fn damaged_states_and_wrong_lengths_are_refused() {
        let mut context = context(&ContextParams { n_slots: 2, ..ContextParams::default() });
        prefill(&mut context, &prompt(30), 0);
        let state = context.state_get(0).expect("a state");
        for cut in [0, 1, 3, 8, 12, 40, state.len() / 2, state.len() - 1] {
            assert!(context.state_set(1, &state[..cut], 30).is_err(), "cut at {cut}");
            assert_eq!(context.seq_pos_max(1), Ok(None), "cut at {cut}");
        }
        let longer = [state.as_slice(), &[0]].concat();
        assert!(context.state_set(1, &longer, 30).is_err());
        let error = context.state_set(1, &state, 31).expect_err("30 tokens are not 31");
        assert!(error.to_string().contains("positions 0 to 29 are there"), "{error}");
        assert_eq!(context.seq_pos_max(1), Ok(None));
        context.state_set(1, &state, 30).expect("the whole state still fits");
    }

    #[test]
    fn the_cells_of_a_sequence_are_its_positions() {
        let unified = ContextParams { kv_unified: true, ..ContextParams::default() };
        for params in [ContextParams::default(), unified] {
            let mut context = context(&ContextParams { n_slots: 3, ..params });
            prefill(&mut context, &prompt(20), 0);
            prefill(&mut context, &prompt(9), 2);
            context.check_seq_cells(0, 20).expect("20 tokens");
            context.check_seq_cells(1, 0).expect("nothing");
            context.check_seq_cells(2, 9).expect("9 tokens");
            assert_eq!(first_cells(&context.state_get(2).expect("a state"), 2), Some((0..9).collect()));
            for (seq, n_tokens) in [(0, 19), (0, 21), (0, 0), (1, 1)] {
                context.check_seq_cells(seq, n_tokens).expect_err("something else");
            }
            context.seq_truncate(0, 7).expect("cut");
            context.check_seq_cells(0, 7).expect("7 tokens");
        }
        assert_eq!(first_cells(&[0; 16], 0), None);
    }

    /// llama.cpp's context shift, which no function here does.
    #[test]
    fn a_sequence_with_a_gap_or_a_shift_is_not_what_was_run() {
        let unified = ContextParams { kv_unified: true, ..ContextParams::default() };
        for params in [ContextParams::default(), unified] {
            let mut context = context(&ContextParams { n_slots: 2, ..params });
            prefill(&mut context, &prompt(20), 0);
            // SAFETY: the context is open and has a sequence 0.
            assert!(unsafe { sys::llama_memory_seq_rm(context.memory(), 0, 4, 8) });
            context.verify(0, 20).expect("both ends are there");
            let error = context.check_seq_cells(0, 20).expect_err("a gap").to_string();
            assert!(error.contains("not positions 0 to 19 but [0, 1, 2, 3, 8, 9,"), "{error}");
            // SAFETY: as above.
            unsafe { sys::llama_memory_seq_add(context.memory(), 0, 8, -1, -4) };
            for n_tokens in [20, 19, 17] {
                context.verify(0, n_tokens).expect_err("16 positions");
                context.check_seq_cells(0, n_tokens).expect_err("16 positions");
            }
            // SAFETY: as above.
            unsafe { sys::llama_memory_seq_add(context.memory(), 0, 0, -1, 4) };
            let error = context.check_seq_cells(0, 20).expect_err("no beginning").to_string();
            assert!(error.contains("positions 4 to 19 are there"), "{error}");
        }
    }

    #[test]
    fn an_empty_sequence_moves_as_an_empty_one() {
        let mut context = context(&ContextParams { n_slots: 2, ..ContextParams::default() });
        prefill(&mut context, &prompt(10), 1);
        context.seq_cp(0, 1).expect("copied");
        assert_eq!(context.seq_pos_max(1), Ok(None));
        assert!(context.seq_cp(0, 2).is_err());
    }

    #[test]
    fn truncating_is_forgetting() {
        let tokens = prompt(64);
        let mut context = context(&ContextParams { n_slots: 2, ..ContextParams::default() });
        prefill(&mut context, &tokens, 0);
        context.seq_truncate(0, 64).expect("nothing to drop");
        context.seq_truncate(0, 40).expect("24 tokens dropped");
        assert_eq!(context.seq_pos_max(0), Ok(Some(39)));
        prefill(&mut context, &tokens[..40], 1);
        assert_eq!(next(&mut context, 0, 40), next(&mut context, 1, 40));
    }

    #[test]
    fn a_shared_sequence_in_one_stream_is_a_copy() {
        let params = ContextParams { n_slots: 2, kv_unified: true, ..ContextParams::default() };
        let mut context = context(&params);
        prefill(&mut context, &prompt(33), 0);
        context.seq_cp(0, 1).expect("shared");
        assert_eq!(context.seq_pos_max(1), Ok(Some(32)));
        let stayed = next(&mut context, 0, 33);
        context.clear_seq(0).expect("emptied");
        assert_eq!(next(&mut context, 1, 33), stayed);
    }
}
