use crate::{
    trace::{
        GateSums, PromptKey, RecordSettings, TraceError, TraceHeader, TraceRequest,
        encode::{Header, check_header},
        request::check,
    },
    types::shown,
};

/// The header and the settings in the content of record 0.
pub fn decode_header(content: &[u8]) -> Result<(TraceHeader, RecordSettings), TraceError> {
    let wrong = |problem: String| TraceError::Content { record: 0, problem };
    let header: Header = serde_json::from_slice(content)
        .map_err(|error| wrong(format!("is no header ({})", shown(&error.to_string()))))?;
    let (header, settings) = header.split();
    check_header(&header, &settings).map_err(wrong)?;
    Ok((header, settings))
}

/// The request in the content of record `number`, and what was asked for it.
///
/// Errors: content that does not fit the header; every block's counts must add up to its tokens' picks.
pub fn decode_request(
    header: &TraceHeader,
    gates: bool,
    number: u32,
    content: &[u8],
) -> Result<(TraceRequest, PromptKey), TraceError> {
    let wrong = |problem: &str| TraceError::Content { record: number, problem: problem.to_owned() };
    let (request, key) =
        read(header, gates, &mut Reader(content)).ok_or_else(|| wrong("has another length than its parts"))?;
    let Some(request) = request else { return Err(wrong("has an id, a domain or counts that can not be")) };
    check(header, gates, &request).map_err(|problem| wrong(&problem))?;
    Ok((request, key))
}

/// Nothing if the lengths do not add up; no request if its parts can not be.
fn read(header: &TraceHeader, gates: bool, reader: &mut Reader<'_>) -> Option<(Option<TraceRequest>, PromptKey)> {
    let [n_id, n_domain, n_prompt, n_steps, n_nonzero] = [(); 5].map(|()| reader.u32());
    let (n_prompt, n_domain) = (n_prompt?, n_domain? as usize);
    let key = PromptKey(*reader.take(8)?.first_chunk()?);
    let id = reader.take(n_id? as usize)?;
    let domain = reader.take(n_domain.saturating_sub(1))?;
    let n_counts = header.n_blocks(n_prompt).checked_mul(header.block_width())?;
    let bits = reader.take(n_counts.div_ceil(8))?;
    let values = reader.take(n_nonzero? as usize)?;
    let n_picks = (n_steps? as usize).checked_mul(header.step_width())?;
    let picks: Vec<u16> = if header.shape.n_expert <= 256 {
        reader.take(n_picks)?.iter().map(|&expert| u16::from(expert)).collect()
    } else {
        reader.take(n_picks.checked_mul(2)?)?.as_chunks().0.iter().map(|&expert| u16::from_le_bytes(expert)).collect()
    };
    let mut sums = || {
        let bytes = reader.take(header.block_width() * 4)?;
        Some(bytes.as_chunks().0.iter().map(|&sum| f32::from_le_bytes(sum)).collect())
    };
    let gates = if gates { Some(GateSums { probability: sums()?, logit: sums()? }) } else { None };
    if !reader.0.is_empty() {
        return None;
    }
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
    let request = || {
        let domain = if n_domain == 0 { None } else { Some(text(domain)?) };
        Some(TraceRequest { id: text(id)?, domain, n_prompt, blocks: counts(bits, values, n_counts)?, picks, gates })
    };
    Some((request(), key))
}

/// `n` counts from their bits and the values that are not zero; nothing if there are more or fewer values than bits.
fn counts(bits: &[u8], values: &[u8], n: usize) -> Option<Vec<u8>> {
    let mut counts = vec![0; n];
    let mut values = values.iter();
    for (byte, counts) in bits.iter().zip(counts.chunks_mut(8)) {
        let is_set = |i: usize| byte >> i & 1 == 1;
        if (counts.len()..8).any(is_set) {
            return None;
        }
        for (_, count) in counts.iter_mut().enumerate().filter(|(i, _)| is_set(*i)) {
            *count = *values.next().filter(|&&value| value != 0)?;
        }
    }
    values.next().is_none().then_some(counts)
}

/// Bytes read from the front.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.first_chunk().map(|&bytes| u32::from_le_bytes(bytes))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{
        rng::Rng,
        trace::{encode_header, encode_request},
        types::MoeShape,
    };

    fn header(n_expert: u32) -> TraceHeader {
        let shape = MoeShape { layers: vec![1, 2, 4], n_layer: 5, n_expert, n_expert_used: 2 };
        TraceHeader { shape, fingerprint: "planted \"1\"".into(), n_block: 3 }
    }

    /// A request whose picks were drawn with `seed`.
    fn request(header: &TraceHeader, gates: bool, n_prompt: u32, n_steps: usize, seed: u64) -> TraceRequest {
        let mut rng = Rng::new(seed);
        let (e, layers) = (header.shape.n_expert as usize, header.shape.usable().len());
        let mut blocks = vec![0; header.n_blocks(n_prompt) * layers * e];
        for (position, layer) in (0..n_prompt).flat_map(|position| (0..layers).map(move |layer| (position, layer))) {
            let row = (position / header.n_block) as usize * layers + layer;
            for _ in 0..2 {
                blocks[row * e + rng.below(e)] += 1;
            }
        }
        let picks = (0..n_steps * header.step_width()).map(|_| rng.below(e) as u16).collect();
        let mut sums = || (0..layers * e).map(|_| rng.uniform() as f32).collect();
        let gates = gates.then(|| GateSums { probability: sums(), logit: sums() });
        let domain = (!seed.is_multiple_of(3)).then(|| "d".repeat(seed as usize % 3 - 1));
        TraceRequest { id: format!("r\u{e9}{seed}"), domain, n_prompt, blocks, picks, gates }
    }

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded(
            (n_expert, gates, n_prompt, n_steps, seed) in (2u32..600, any::<bool>(), 1u32..20, 0usize..9, any::<u64>()),
        ) {
            let header = header(n_expert);
            let want = (request(&header, gates, n_prompt, n_steps, seed), PromptKey(seed.to_le_bytes()));
            let content = encode_request(&header, gates, 7, &want.0, want.1).expect("sound");
            prop_assert_eq!(decode_request(&header, gates, 7, &content), Ok(want));
            let settings = RecordSettings { seed, temperature: n_steps as f32 / 7.0, gates, ..RecordSettings::default() };
            let content = encode_header(&header, &settings).expect("sound");
            prop_assert_eq!(decode_header(&content), Ok((header, settings)));
        }

        /// Whatever passes the checksum by design of its writer must not panic or be read in two ways.
        #[test]
        fn no_bytes_make_it_panic(place in 0usize..500, byte: u8, cut in 0usize..500, gates: bool) {
            let header = header(9);
            let mut content = encode_request(&header, gates, 1, &request(&header, gates, 7, 3, 5), PromptKey::default()).expect("sound");
            let n = content.len();
            content[place % n] = byte;
            if let Ok((request, key)) = decode_request(&header, gates, 1, &content) {
                prop_assert_eq!(encode_request(&header, gates, 1, &request, key), Ok(content.clone()));
            }
            content.truncate(cut);
            let _ = decode_request(&header, gates, 1, &content);
            let _ = decode_header(&content);
        }
    }

    #[test]
    fn a_request_that_does_not_fit_its_header_is_refused_by_both_ends() {
        let header = header(9);
        let good = request(&header, true, 7, 3, 5);
        let wrong = |change: &dyn Fn(&mut TraceRequest)| {
            let mut request = good.clone();
            change(&mut request);
            encode_request(&header, true, 4, &request, PromptKey::default()).expect_err("refused").to_string()
        };
        for (error, want) in [
            (wrong(&|r| r.blocks[0] += 1), "has 7 picks of 3 tokens in block 0, row 0, where 2 a token belong"),
            (wrong(&|r| r.blocks.truncate(18)), "has 18 prefill counts where 54 belong"),
            (wrong(&|r| r.picks.truncate(7)), "has 7 picks, which is no multiple of the 6 of a step"),
            (wrong(&|r| r.picks[2] = 9), "picks expert 9 of 9"),
            (wrong(&|r| r.gates = None), "lacks the gate's sums"),
            (wrong(&|r| r.id.clear()), "has no id or no prompt"),
            (wrong(&|r| r.gates.as_mut().expect("given").logit[3] = f32::NAN), "has a gate sum that is no number"),
        ] {
            assert_eq!(error, format!("record 4 of the trace {want}: record it again"));
        }
        let content = encode_request(&header, true, 4, &good, PromptKey::default()).expect("sound");
        assert!(decode_request(&header, false, 4, &content).is_err(), "gates where none belong");
        assert!(decode_request(&TraceHeader { n_block: 2, ..header.clone() }, true, 4, &content).is_err());
        let other = TraceHeader { shape: MoeShape { n_expert_used: 1, ..header.shape.clone() }, ..header };
        assert!(decode_request(&other, true, 4, &content).is_err(), "counts of two picks a token");
    }

    #[test]
    fn a_header_that_can_not_be_is_refused() {
        let good =
            String::from_utf8(encode_header(&header(9), &RecordSettings::default()).expect("sound")).expect("JSON");
        for (from, to) in [
            ("[1,2,4]", "[1,4,2]"),
            ("[1,2,4]", "[1,2,5]"),
            ("[1,2,4]", "[]"),
            ("\"n_expert\":9", "\"n_expert\":70000"),
            ("\"n_expert_used\":2", "\"n_expert_used\":10"),
            ("\"n_block\":3", "\"n_block\":0"),
            ("\"n_block\":3", "\"n_block\":129"),
            ("\"temperature\":0.8", "\"temperature\":-1"),
            ("\"seed\"", "\"sead\""),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, good, "{from}");
            assert!(matches!(decode_header(bad.as_bytes()), Err(TraceError::Content { record: 0, .. })), "{to}");
        }
    }
}
