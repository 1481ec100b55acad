//! What calibration learns from: the prefill and decode counts of recorded requests.
//!
//! Never records anything itself.

use ndarray::{ArrayView2, ArrayView3, s};

use crate::{signature::ExpertCounts, trace::Trace, types::MoeShape};

/// Recorded requests: whose prompts picked which experts, and which experts their outputs picked then.
#[derive(Debug, Clone, PartialEq)]
pub struct CalibrationInput {
    shape: MoeShape,
    fingerprint: String,
    usable: Vec<u32>,
    ids: Vec<String>,
    labels: Vec<Option<String>>,
    n_tokens: Vec<u32>,
    prefill: Vec<u32>,
    decode: Vec<u32>,
}

impl CalibrationInput {
    /// No requests yet, of the model `fingerprint` with MoE shape `shape`.
    pub fn new(shape: MoeShape, fingerprint: impl Into<String>) -> Self {
        Self {
            usable: shape.usable(),
            shape,
            fingerprint: fingerprint.into(),
            ids: Vec::new(),
            labels: Vec::new(),
            n_tokens: Vec::new(),
            prefill: Vec::new(),
            decode: Vec::new(),
        }
    }

    /// The requests at positions `which` of a trace, in that order.
    pub fn of_trace(trace: &Trace, which: impl IntoIterator<Item = usize>) -> Self {
        let mut input = Self::new(trace.header.shape.clone(), trace.header.fingerprint.clone());
        for at in which {
            let request = &trace.requests[at];
            let (prefill, decode) = (request.prefill_counts(&trace.header), request.decode_counts(&trace.header));
            input.push(request.id.clone(), request.domain.clone(), &prefill, &decode);
        }
        input
    }

    /// Requests whose counts lie row by row already: prefill over the usable layers, and decode over all.
    pub(super) fn of_parts(
        shape: MoeShape,
        fingerprint: String,
        ids: Vec<String>,
        labels: Vec<Option<String>>,
        n_tokens: Vec<u32>,
        [prefill, decode]: [Vec<u32>; 2],
    ) -> Self {
        let input = Self { ids, labels, n_tokens, prefill, decode, ..Self::new(shape, fingerprint) };
        let n = input.n_requests();
        assert!(input.labels.len() == n && input.n_tokens.len() == n, "a label and a length for each request");
        assert_eq!((input.prefill().len(), input.decode().len()), (input.prefill.len(), input.decode.len()));
        input
    }

    /// Adds a request. `prefill` has a row for each usable layer, `decode` one for every MoE layer. The label (its
    /// domain, say) takes no part in the fit; the report compares the clusters with it.
    pub fn push(
        &mut self,
        id: impl Into<String>,
        label: Option<String>,
        prefill: &ExpertCounts,
        decode: &ExpertCounts,
    ) {
        for counts in [prefill, decode] {
            assert_eq!(counts.n_expert(), self.shape.n_expert, "counts of another model");
        }
        for &layer in &self.usable {
            self.prefill.extend(prefill.row(layer).expect("prefill counts lack a usable layer"));
        }
        for layer in 0..self.shape.n_layer_moe() as u32 {
            self.decode.extend(decode.row(layer).expect("decode counts lack a layer"));
        }
        self.ids.push(id.into());
        self.labels.push(label);
        self.n_tokens.push(prefill.n_tokens());
    }

    /// The model's MoE layers and experts.
    pub fn shape(&self) -> &MoeShape {
        &self.shape
    }

    /// Which model the requests were recorded on.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Requests recorded (N).
    pub fn n_requests(&self) -> usize {
        self.ids.len()
    }

    /// The requests' names, in order of recording.
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The requests' labels, in the same order.
    pub fn labels(&self) -> &[Option<String>] {
        &self.labels
    }

    /// Prompt tokens of each request.
    pub fn n_tokens(&self) -> &[u32] {
        &self.n_tokens
    }

    /// MoE layers with prefill counts, ascending (L').
    pub fn usable(&self) -> &[u32] {
        &self.usable
    }

    /// Prefill counts, N x L' x E.
    pub fn prefill(&self) -> ArrayView3<'_, u32> {
        self.cube(&self.prefill, self.usable.len())
    }

    /// Decode counts, N x L x E.
    pub fn decode(&self) -> ArrayView3<'_, u32> {
        self.cube(&self.decode, self.shape.n_layer_moe())
    }

    /// Prefill counts of one usable layer (its position in [`CalibrationInput::usable`]), N x E.
    pub fn prefill_layer(&self, position: usize) -> ArrayView2<'_, u32> {
        self.prefill().slice_move(s![.., position, ..])
    }

    fn cube<'a>(&self, counts: &'a [u32], n_layers: usize) -> ArrayView3<'a, u32> {
        let dim = (self.ids.len(), n_layers, self.shape.n_expert as usize);
        ArrayView3::from_shape(dim, counts).expect("each request adds one row a layer")
    }
}
