//! The tap: which experts each token of a batch picked, read from llama.cpp's gate while it computes.
//!
//! Never hands out a row it cannot vouch for, and never stops a computation: faults are latched and reported after it.
//!
//! ggml calls back for every node of the graph, first to ask whether we want it, then with its data. Wanted are the
//! nodes `ffn_moe_topk-<layer>` (llama-graph.cpp, `build_moe_ffn`): I32, one column of k ids for each token of the
//! ubatch, usually a view into a longer row of all experts, so it is read by its stride.

use std::{
    ffi::{CStr, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
};

use llama_cpp_sys_2 as sys;

use super::gate::{GateNode, GateOutputs};
use crate::types::MoeShape;

const PREFIX: &[u8] = b"ffn_moe_";

/// A node the tap reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Node {
    TopK,
    Gate(GateNode),
}

/// The experts every token of a batch picked in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TapRows<'a> {
    /// The MoE layer, as a row of [`MoeShape::layers`].
    pub layer: u32,
    /// Experts a token picks (k).
    pub n_expert_used: usize,
    /// k ids for each token of the batch, in batch order; every id is below the number of experts.
    pub experts: &'a [u32],
    /// The gate's probability of every expert, for each token; empty unless the tap reads gates.
    pub probabilities: &'a [f32],
    /// The logits the experts were chosen by, for each token; empty unless the tap reads gates.
    pub logits: &'a [f32],
}

impl<'a> TapRows<'a> {
    /// The k experts of each token, in batch order.
    pub fn tokens(&self) -> std::slice::ChunksExact<'a, u32> {
        self.experts.chunks_exact(self.n_expert_used)
    }
}

/// The state the callback writes. Owned by a context and freed after it.
pub(super) struct Tap {
    state: NonNull<State>,
}

// SAFETY: the state is reached only through the context that owns the tap, and by llama.cpp on the thread that is
// inside that context's decode.
unsafe impl Send for Tap {}

impl Drop for Tap {
    fn drop(&mut self) {
        // SAFETY: made by Box::into_raw in `new`; the context that could call back is freed before its tap.
        drop(unsafe { Box::from_raw(self.state.as_ptr()) });
    }
}

struct State {
    shape: MoeShape,
    /// By llama.cpp's layer number: the row of a wanted layer.
    wanted: Vec<Option<u32>>,
    /// A decode whose picks are wanted is running.
    active: bool,
    /// By row: the ids read so far.
    picks: Vec<Vec<u32>>,
    /// By row: nodes read so far, one for each ubatch.
    nodes: Vec<u32>,
    /// By row: what its gate said; empty where gates are not read.
    gates: Vec<GateOutputs>,
    scratch: Vec<i32>,
    fault: Option<String>,
}

impl Tap {
    /// A tap on every MoE layer.
    pub fn new(shape: &MoeShape) -> Self {
        let rows = shape.layers.len();
        let state = State {
            shape: shape.clone(),
            wanted: Vec::new(),
            active: false,
            picks: vec![Vec::new(); rows],
            nodes: vec![0; rows],
            gates: Vec::new(),
            scratch: Vec::new(),
            fault: None,
        };
        let state = NonNull::from(Box::leak(Box::new(state)));
        let mut tap = Self { state };
        tap.set_layers(&(0..rows as u32).collect::<Vec<_>>());
        tap
    }

    /// The callback and its user data, for the context's parameters.
    pub fn callback(&self) -> (sys::ggml_backend_sched_eval_callback, *mut c_void) {
        (Some(on_node), self.state.as_ptr().cast())
    }

    /// Reads only these rows of the shape from now on.
    pub fn set_layers(&mut self, rows: &[u32]) {
        let state = self.state();
        let n_layer = state.shape.n_layer as usize;
        state.wanted = vec![None; n_layer];
        for &row in rows {
            let layer = state.shape.layers[row as usize];
            state.wanted[layer as usize] = Some(row);
        }
    }

    /// Reads the gate's outputs too, from now on.
    pub fn read_gates(&mut self) {
        let state = self.state();
        state.gates.resize_with(state.shape.layers.len(), GateOutputs::default);
    }

    /// MoE layers of the model.
    pub fn n_rows(&mut self) -> u32 {
        self.state().shape.layers.len() as u32
    }

    /// Starts reading.
    pub fn start(&mut self) {
        let state = self.state();
        state.active = true;
        state.fault = None;
        state.picks.iter_mut().for_each(Vec::clear);
        state.nodes.fill(0);
        state.gates.iter_mut().for_each(GateOutputs::clear);
    }

    /// Stops reading.
    pub fn stop(&mut self) {
        self.state().active = false;
    }

    /// Hands out each wanted layer's rows, ascending, once every layer is known to hold `n_tokens` columns.
    ///
    /// The model's last layer computes only the rows whose logits were asked for: it is left out when that is not all.
    pub fn deliver(&mut self, n_tokens: usize, sink: &mut dyn FnMut(TapRows<'_>)) -> Result<(), String> {
        let state = self.state();
        if let Some(fault) = state.fault.take() {
            return Err(fault);
        }
        let k = state.shape.n_expert_used as usize;
        let rows: Vec<u32> = state.wanted.iter().flatten().copied().collect();
        let is_whole = |row: u32| state.picks[row as usize].len() == n_tokens * k;
        for &row in &rows {
            let layer = state.shape.layers[row as usize];
            let columns = state.picks[row as usize].len() / k;
            let may_be_short = layer + 1 == state.shape.n_layer && columns < n_tokens;
            if !is_whole(row) && !may_be_short {
                return Err(format!("layer {layer} showed picks of {columns} tokens for a batch of {n_tokens}"));
            }
        }
        let whole: Vec<u32> = rows.into_iter().filter(|&row| is_whole(row)).collect();
        // All are in order before any is handed out.
        for &row in &whole {
            let Some(gate) = state.gates.get_mut(row as usize) else { break };
            let finished = gate.finish(n_tokens, state.shape.n_expert);
            finished.map_err(|reason| format!("layer {}: {reason}", state.shape.layers[row as usize]))?;
        }
        for row in whole {
            let (probabilities, logits) =
                state.gates.get(row as usize).map_or((&[][..], &[][..]), GateOutputs::outputs);
            let experts = &state.picks[row as usize];
            sink(TapRows { layer: row, n_expert_used: k, experts, probabilities, logits });
        }
        Ok(())
    }

    /// Ubatches the last tapped batch was cut into; 0 when no layer is wanted.
    pub fn n_ubatches(&mut self) -> u32 {
        self.state().nodes.iter().copied().max().unwrap_or(0)
    }

    fn state(&mut self) -> &mut State {
        // SAFETY: `&mut self` means that no decode of the owning context is running, so the callback is not either.
        unsafe { self.state.as_mut() }
    }
}

impl State {
    /// The row of a wanted layer and what the node is to it.
    fn node_of(&self, name: &[u8]) -> Option<(u32, Node)> {
        let name = name.strip_prefix(PREFIX)?;
        let dash = name.iter().position(|&byte| byte == b'-')?;
        let node = match &name[..dash] {
            b"topk" => Node::TopK,
            _ if self.gates.is_empty() => return None,
            gate => Node::Gate(GateNode::of_name(gate)?),
        };
        let layer: usize = std::str::from_utf8(&name[dash + 1..]).ok()?.parse().ok()?;
        Some(((*self.wanted.get(layer)?)?, node))
    }

    /// Reads the node's columns behind those of earlier ubatches.
    fn read(&mut self, row: u32, node: Node, tensor: &sys::ggml_tensor) {
        if self.fault.is_some() {
            return;
        }
        let n_expert = self.shape.n_expert;
        let read = match node {
            Node::TopK => {
                self.nodes[row as usize] += 1;
                let k = self.shape.n_expert_used as usize;
                read_columns(tensor, k, n_expert, &mut self.scratch, &mut self.picks[row as usize])
            }
            Node::Gate(kind) => self.gates[row as usize].read(kind, tensor, n_expert),
        };
        if let Err(reason) = read {
            self.fault = Some(format!("layer {}: {reason}", self.shape.layers[row as usize]));
        }
    }
}

/// Appends the ids of every column of `node` to `out`: k a column, by stride, each below `n_expert`.
fn read_columns(
    node: &sys::ggml_tensor,
    k: usize,
    n_expert: u32,
    scratch: &mut Vec<i32>,
    out: &mut Vec<u32>,
) -> Result<(), String> {
    let bytes = k * size_of::<i32>();
    let fits = node.type_ == sys::GGML_TYPE_I32
        && usize::try_from(node.ne[0]) == Ok(k)
        && node.ne[2] == 1
        && node.ne[3] == 1
        && node.nb[0] == size_of::<i32>()
        && node.nb[1] >= bytes;
    let (Ok(columns), true) = (usize::try_from(node.ne[1]), fits) else {
        return Err(format!(
            "the gate's node has type {}, shape {:?} and strides {:?} where {k} packed ids a token were expected",
            node.type_, node.ne, node.nb
        ));
    };
    scratch.clear();
    scratch.resize(k * columns, -1);
    // SAFETY: the node is computed; each of `columns` rows of `bytes` bytes lies inside it, `nb[1]` apart, and the
    // scratch holds them packed.
    unsafe {
        sys::ggml_backend_tensor_get_2d(node, scratch.as_mut_ptr().cast(), 0, bytes, columns, node.nb[1], bytes);
    }
    for &id in scratch.iter() {
        match u32::try_from(id) {
            Ok(expert) if expert < n_expert => out.push(expert),
            _ => return Err(format!("a token picked expert {id} of {n_expert}")),
        }
    }
    Ok(())
}

unsafe extern "C" fn on_node(node: *mut sys::ggml_tensor, ask: bool, user: *mut c_void) -> bool {
    let answer = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the user data is the state of the tap that the calling context owns, and nobody else holds a
        // reference to it while the context decodes.
        let state = unsafe { &mut *user.cast::<State>() };
        if !state.active {
            return false;
        }
        // SAFETY: ggml passes a node of the graph it is computing.
        let node = unsafe { &*node };
        // SAFETY: ggml keeps tensor names terminated.
        let name = unsafe { CStr::from_ptr(node.name.as_ptr()) };
        let Some((row, kind)) = state.node_of(name.to_bytes()) else { return false };
        if !ask {
            state.read(row, kind, node);
        }
        true
    }));
    answer.unwrap_or_else(|_| {
        // SAFETY: as above; the reference in the closure is gone.
        let state = unsafe { &mut *user.cast::<State>() };
        state.fault = Some("the tap panicked".to_owned());
        false
    }) || !ask
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape() -> MoeShape {
        MoeShape { layers: vec![1, 2, 4], n_layer: 5, n_expert: 8, n_expert_used: 2 }
    }

    #[test]
    fn only_the_exact_node_of_a_wanted_layer_matches() {
        let mut tap = Tap::new(&shape());
        let row = |tap: &mut Tap, name: &str| tap.state().node_of(name.as_bytes()).map(|(row, _)| row);
        assert_eq!(row(&mut tap, "ffn_moe_topk-2"), Some(1));
        tap.set_layers(&[0, 2]);
        assert_eq!(row(&mut tap, "ffn_moe_topk-1"), Some(0));
        for name in [
            "ffn_moe_topk-2",
            "ffn_moe_topk-0",
            "ffn_moe_topk-9",
            "ffn_moe_group_topk-1",
            "mtp_ffn_moe_topk-1",
            "ffn_moe_topk-",
            "ffn_moe_topk-1 (view)",
            "ffn_moe_topk--1",
            "ffn_moe_probs-1",
            "ffn_moe_logits-1",
        ] {
            assert_eq!(row(&mut tap, name), None, "{name}");
        }
        tap.read_gates();
        let node = |tap: &mut Tap, name: &str| tap.state().node_of(name.as_bytes());
        assert_eq!(node(&mut tap, "ffn_moe_topk-1"), Some((0, Node::TopK)));
        assert_eq!(node(&mut tap, "ffn_moe_logits-4"), Some((2, Node::Gate(GateNode::Logits))));
        assert_eq!(node(&mut tap, "ffn_moe_logits_biased-4"), Some((2, Node::Gate(GateNode::LogitsBiased))));
        assert_eq!(node(&mut tap, "ffn_moe_probs-1"), Some((0, Node::Gate(GateNode::Probabilities))));
        for name in ["ffn_moe_probs-2", "ffn_moe_probs_biased-1", "ffn_moe_probs_masked-1", "ffn_moe_probs"] {
            assert_eq!(node(&mut tap, name), None, "{name}");
        }
    }

    fn delivered(tap: &mut Tap, n_tokens: usize) -> Result<Vec<(u32, usize)>, String> {
        let mut seen = Vec::new();
        tap.deliver(n_tokens, &mut |rows| seen.push((rows.layer, rows.tokens().len())))?;
        Ok(seen)
    }

    #[test]
    fn a_layer_that_lost_tokens_is_a_fault_and_nothing_is_delivered() {
        let mut tap = Tap::new(&shape());
        tap.start();
        tap.state().picks = vec![vec![0; 6], vec![0; 4], vec![0; 6]];
        assert!(delivered(&mut tap, 3).expect_err("layer 2 is short").contains("layer 2"));
        tap.state().picks[1] = vec![0; 8];
        assert!(delivered(&mut tap, 3).is_err());
    }

    #[test]
    fn the_last_layer_is_left_out_when_short_and_a_fault_when_long() {
        let mut tap = Tap::new(&shape());
        tap.start();
        tap.state().picks = vec![vec![0; 6], vec![0; 6], vec![0; 2]];
        assert_eq!(delivered(&mut tap, 3), Ok(vec![(0, 3), (1, 3)]));
        tap.state().picks[2] = vec![0; 6];
        assert_eq!(delivered(&mut tap, 3), Ok(vec![(0, 3), (1, 3), (2, 3)]));
        tap.state().picks[2] = vec![0; 8];
        assert!(delivered(&mut tap, 3).is_err());
    }

    #[test]
    fn a_fault_is_reported_once() {
        let mut tap = Tap::new(&shape());
        tap.start();
        tap.state().fault = Some("broken".to_owned());
        assert_eq!(delivered(&mut tap, 0), Err("broken".to_owned()));
        tap.start();
        assert_eq!(delivered(&mut tap, 0), Ok(vec![(0, 0), (1, 0), (2, 0)]));
    }

    /// A ggml tensor of I32 rows in host memory, freed with its context.
    struct Rows {
        ctx: *mut sys::ggml_context,
        buffer: sys::ggml_backend_buffer_t,
        base: *mut sys::ggml_tensor,
    }

    fn long(n: usize) -> i64 {
        i64::try_from(n).expect("small")
    }

    impl Rows {
        fn new(values: &[i32], width: usize) -> Self {
            let params =
                sys::ggml_init_params { mem_size: 16 * 1024, mem_buffer: std::ptr::null_mut(), no_alloc: true };
            // SAFETY: ggml allocates its own memory for two tensors' descriptions.
            let ctx = unsafe { sys::ggml_init(params) };
            let (width, height) = (long(width), long(values.len() / width));
            // SAFETY: the context is open.
            let base = unsafe { sys::ggml_new_tensor_2d(ctx, sys::GGML_TYPE_I32, width, height) };
            // SAFETY: no precondition.
            let cpu = unsafe { sys::ggml_backend_cpu_buffer_type() };
            // SAFETY: the context holds the unallocated tensor.
            let buffer = unsafe { sys::ggml_backend_alloc_ctx_tensors_from_buft(ctx, cpu) };
            // SAFETY: the tensor is allocated and holds exactly these values.
            unsafe { sys::ggml_backend_tensor_set(base, values.as_ptr().cast(), 0, size_of_val(values)) };
            Self { ctx, buffer, base }
        }

        /// The first `k` columns of every row, as llama.cpp cuts them from an argsort.
        fn first(&self, k: usize, height: usize, stride: usize) -> &sys::ggml_tensor {
            // SAFETY: the base tensor is in the context, and the view stays inside it.
            let view = unsafe { sys::ggml_view_2d(self.ctx, self.base, long(k), long(height), stride, 0) };
            // SAFETY: the base is allocated.
            let status = unsafe { sys::ggml_backend_view_init(view) };
            assert_eq!(status, sys::GGML_STATUS_SUCCESS);
            // SAFETY: the context owns the view for as long as `self`.
            unsafe { &*view }
        }
    }

    impl Drop for Rows {
        fn drop(&mut self) {
            // SAFETY: ours, and not used again.
            unsafe { sys::ggml_backend_buffer_free(self.buffer) };
            // SAFETY: ours, and not used again.
            unsafe { sys::ggml_free(self.ctx) };
        }
    }

    proptest! {
        #[test]
        fn a_strided_view_reads_as_the_first_k_of_every_row(
            (width, k, values) in (1usize..12).prop_flat_map(|width| {
                let rows = (1usize..20).prop_flat_map(move |n| prop::collection::vec(0..i32::try_from(width).expect("small"), n * width));
                (Just(width), 1..=width, rows)
            })
        ) {
            let rows = Rows::new(&values, width);
            let view = rows.first(k, values.len() / width, width * 4);
            let mut out = Vec::new();
            read_columns(view, k, width as u32, &mut Vec::new(), &mut out).expect("a readable view");
            let expected: Vec<u32> = values.chunks(width).flat_map(|row| &row[..k]).map(|&id| id as u32).collect();
            prop_assert_eq!(out, expected);
        }
    }

    #[test]
    fn ids_outside_the_experts_and_other_shapes_are_refused() {
        let rows = Rows::new(&[0, 1, 2, 3, -1, 5], 3);
        let read = |node: &sys::ggml_tensor, k: usize, n_expert: u32| {
            read_columns(node, k, n_expert, &mut Vec::new(), &mut Vec::new())
        };
        let two = rows.first(2, 2, 12);
        assert!(read(two, 2, 8).expect_err("id -1").contains("expert -1 of 8"));
        assert!(read(two, 2, 3).expect_err("id 3").contains("expert 3 of 3"));
        assert!(read(two, 3, 8).expect_err("2 ids where 3 were expected").contains("3 packed ids"));
        assert_eq!(read(rows.first(1, 2, 12), 1, 4), Ok(()));
    }
}
