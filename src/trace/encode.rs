use serde::{Deserialize, Serialize};

use crate::{
    trace::{PromptKey, RecordSettings, TraceError, TraceHeader, TraceRequest, request::check},
    types::MoeShape,
};

/// The header's JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Header {
    fingerprint: String,
    layers: Vec<u32>,
    n_layer: u32,
    n_expert: u32,
    n_expert_used: u32,
    n_block: u32,
    max_tokens: u32,
    temperature: f32,
    seed: u64,
    chat: bool,
    gates: bool,
}

impl Header {
    fn new(header: &TraceHeader, settings: &RecordSettings) -> Self {
        let TraceHeader { shape, fingerprint, n_block } = header.clone();
        let MoeShape { layers, n_layer, n_expert, n_expert_used } = shape;
        let RecordSettings { max_tokens, temperature, seed, chat, gates } = *settings;
        Self {
            fingerprint,
            layers,
            n_layer,
            n_expert,
            n_expert_used,
            n_block,
            max_tokens,
            temperature,
            seed,
            chat,
            gates,
        }
    }

    /// The two parts.
    pub fn split(self) -> (TraceHeader, RecordSettings) {
        let Self { fingerprint, layers, n_layer, n_expert, n_expert_used, n_block, .. } = self;
        let Self { max_tokens, temperature, seed, chat, gates, .. } = self;
        let shape = MoeShape { layers, n_layer, n_expert, n_expert_used };
        let settings = RecordSettings { max_tokens, temperature, seed, chat, gates };
        (TraceHeader { shape, fingerprint, n_block }, settings)
    }
}

/// What is wrong with a header, if it is.
pub(super) fn check_header(header: &TraceHeader, settings: &RecordSettings) -> Result<(), String> {
    let MoeShape { layers, n_layer, n_expert, n_expert_used } = &header.shape;
    let ascend = layers.windows(2).all(|pair| pair[0] < pair[1]) && layers.last().is_some_and(|last| last < n_layer);
    if !ascend {
        return Err(format!("has the MoE layers {layers:?}, which must ascend below the model's {n_layer}"));
    }
    if !(1..=1 << 16).contains(n_expert) || !(1..=*n_expert).contains(n_expert_used) {
        return Err(format!("has {n_expert_used} of {n_expert} experts a token, where 1 to 65536 can be"));
    }
    if !(1..=128).contains(&header.n_block) {
        return Err(format!("has blocks of {} tokens, where 1 to 128 can be", header.n_block));
    }
    if !(0.0..=f32::MAX).contains(&settings.temperature) {
        return Err(format!("has the temperature {}, which must be 0 or more", settings.temperature));
    }
    Ok(())
}

/// The content of a trace's header. Errors: a header no trace can have.
pub fn encode_header(header: &TraceHeader, settings: &RecordSettings) -> Result<Vec<u8>, TraceError> {
    check_header(header, settings).map_err(|problem| TraceError::Content { record: 0, problem })?;
    Ok(serde_json::to_vec(&Header::new(header, settings)).expect("plain fields"))
}

/// The content of record `number`, a request of a trace with `header` that was recorded with `gates` or without.
///
/// Errors: counts, picks or gate sums that do not fit the header.
pub fn encode_request(
    header: &TraceHeader,
    gates: bool,
    number: u32,
    request: &TraceRequest,
    key: PromptKey,
) -> Result<Vec<u8>, TraceError> {
    check(header, gates, request).map_err(|problem| TraceError::Content { record: number, problem })?;
    let size = |n: usize| u32::try_from(n).expect("a request is below 4 GiB").to_le_bytes();
    let domain = request.domain.as_deref();
    let n_steps = request.n_steps(header);
    let n_nonzero = request.blocks.iter().filter(|&&n| n != 0).count();
    let mut bytes = Vec::new();
    for n in [request.id.len(), domain.map_or(0, |domain| domain.len() + 1)] {
        bytes.extend(size(n));
    }
    bytes.extend(request.n_prompt.to_le_bytes());
    bytes.extend(size(n_steps));
    bytes.extend(size(n_nonzero));
    bytes.extend(key.0);
    bytes.extend(request.id.as_bytes());
    bytes.extend(domain.unwrap_or_default().as_bytes());
    let bits = |counts: &[u8]| (0..).zip(counts).fold(0u8, |bits, (i, &n)| bits | u8::from(n != 0) << i);
    bytes.extend(request.blocks.chunks(8).map(bits));
    bytes.extend(request.blocks.iter().filter(|&&n| n != 0));
    if header.shape.n_expert <= 256 {
        bytes.extend(request.picks.iter().map(|&expert| expert as u8));
    } else {
        bytes.extend(request.picks.iter().flat_map(|expert| expert.to_le_bytes()));
    }
    if let Some(sums) = &request.gates {
        bytes.extend(sums.probability.iter().chain(&sums.logit).flat_map(|sum| sum.to_le_bytes()));
    }
    Ok(bytes)
}
