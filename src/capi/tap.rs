use std::{mem::MaybeUninit, sync::Arc};

use parking_lot::Mutex;

use super::{
    CalibrationHandle, GetBytes, GetName, Status, TapHandle, TensorGet, TensorLayout,
    args::{self, FromC, Growing},
    calibration::{Basis, OpenCalibration, layer_numbers},
    failure::{Failure, guard_done},
    handles::{self, Class},
    layout::Ggml,
};

pub use super::tap_call::eldr_tap_on_node;

/// Reads the picks of a calibration's layers while the host's context computes.
pub(super) struct OpenTap {
    pub(super) basis: Arc<Basis>,
    pub(super) layout: TensorLayout,
    pub(super) ggml: Ggml,
    /// By llama.cpp's layer number: its position among the counted layers.
    pub(super) wanted: Vec<Option<usize>>,
    pub(super) state: Mutex<TapState>,
}

/// What the callback has seen.
pub(super) struct TapState {
    pub(super) phase: Phase,
    /// By position among the counted layers: the ids read so far.
    pub(super) picks: Vec<Vec<u32>>,
    pub(super) scratch: Vec<i32>,
    pub(super) fault: Option<(Status, String)>,
}

/// What a tap is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Nothing, and it has nothing to show.
    Idle,
    /// Between begin and end.
    Reading,
    /// A batch of so many tokens was read whole.
    Whole(usize),
}

impl Class for OpenTap {
    const NAME: &'static str = "eldr_tap";
    type Handle = TapHandle;
}

impl OpenTap {
    /// Hands out the picks of `n` tokens from the `first`-th, layer by layer.
    pub(super) fn picks(&self, first: usize, n: usize, mut take: impl FnMut(usize, &[u32])) -> Result<(), Failure> {
        let state = self.state.lock();
        let Phase::Whole(n_tokens) = state.phase else {
            let why = "the tap has no whole batch: call eldr_tap_begin(), decode, then eldr_tap_end() first";
            return Err(Failure::new(Status::Tap, why));
        };
        if first.checked_add(n).is_none_or(|end| end > n_tokens) {
            let why = format!("the batch has {n_tokens} tokens, not {n} from token {first} on; ask for fewer");
            return Err(Failure::new(Status::Argument, why));
        }
        let k = self.basis.shape().n_expert_used as usize;
        for (position, picks) in state.picks.iter().enumerate() {
            take(position, &picks[first * k..(first + n) * k]);
        }
        Ok(())
    }

    fn end(&self, n_tokens: usize) -> Result<(), Failure> {
        let mut state = self.state.lock();
        if state.phase != Phase::Reading {
            return Err(Failure::new(Status::Tap, "the tap is not reading; call eldr_tap_begin() before the decode"));
        }
        state.phase = Phase::Idle;
        if let Some((status, why)) = state.fault.take() {
            return Err(Failure::new(status, why));
        }
        let k = self.basis.shape().n_expert_used as usize;
        for (layer, picks) in layer_numbers(&self.basis).iter().zip(&state.picks) {
            if picks.len() != n_tokens * k {
                let why = format!(
                    "layer {layer} showed picks of {} tokens for a batch of {n_tokens}; give the tap to the context \
                     that decodes, and end it after every llama_decode()",
                    picks.len() / k
                );
                return Err(Failure::new(Status::Tap, why));
            }
        }
        state.phase = Phase::Whole(n_tokens);
        Ok(())
    }
}

/// How a tap is made. Fill it with eldr_tap_default_params() first.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct TapParams {
    /// sizeof(eldr_tap_params).
    pub size: usize,
    /// Whose layers are read. Its handle may be freed afterwards.
    pub calibration: *const CalibrationHandle,
    /// Where the fields of the host's tensors are.
    pub layout: TensorLayout,
    /// ggml_get_name of the host's ggml.
    pub get_name: GetName,
    /// ggml_nbytes of the host's ggml.
    pub get_bytes: GetBytes,
    /// ggml_backend_tensor_get of the host's ggml.
    pub tensor_get: TensorGet,
}

// SAFETY: repr(C); numbers, and pointers that may be NULL.
unsafe impl FromC for TapParams {}

impl Growing for TapParams {
    const NAME: &'static str = "eldr_tap_params";
    const FIRST_SIZE: usize = 96;

    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            calibration: std::ptr::null(),
            layout: TensorLayout::default(),
            get_name: None,
            get_bytes: None,
            tensor_get: None,
        }
    }
}

/// Fills `params`, of `size` bytes (sizeof(eldr_tap_params)), with the defaults; the rest is the host's. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_tap_default_params(params: *mut TapParams, size: usize) -> Status {
    // SAFETY: the caller passes a struct of `size` bytes.
    guard_done(|| unsafe { args::write_defaults(params, size, "params") })
}

/// Opens a tap in `out`, which the caller frees. Any thread.
///
/// Give a context eldr_tap_on_node as `cb_eval` and the tap itself as `cb_eval_user_data` in its llama_context_params.
/// One tap is for one context. It costs nothing between eldr_tap_end() and eldr_tap_begin().
/// Errors: ELDR_STATUS_LAYOUT for a layout no compiler makes; one of another ggml is found at the first node and
/// reported by eldr_tap_end().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_tap_open(
    params: *const TapParams,
    out: Option<&mut MaybeUninit<*mut TapHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        // SAFETY: the caller passes a struct whose size it set.
        let params = unsafe { args::read(params, "params") }?;
        let basis = Arc::clone(&handles::get::<OpenCalibration>(params.calibration)?.0);
        params.layout.check()?;
        let (Some(get_name), Some(n_bytes), Some(tensor_get)) = (params.get_name, params.get_bytes, params.tensor_get)
        else {
            let why = "a function of ggml is NULL; pass ggml_get_name, ggml_nbytes and ggml_backend_tensor_get";
            return Err(Failure::new(Status::Null, why));
        };
        let mut wanted = vec![None; basis.shape().n_layer as usize];
        for (position, layer) in layer_numbers(&basis).into_iter().enumerate() {
            wanted[layer as usize] = Some(position);
        }
        let state = Mutex::new(TapState {
            phase: Phase::Idle,
            picks: vec![Vec::new(); basis.layers.len()],
            scratch: Vec::new(),
            fault: None,
        });
        let ggml = Ggml { get_name, n_bytes, tensor_get };
        out.write(handles::insert(OpenTap { basis, layout: params.layout, ggml, wanted, state }));
        Ok(())
    })
}

/// Reads the picks of the next llama_decode() of the tap's context. What was read before is forgotten. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_tap_begin(tap: *mut TapHandle) -> Status {
    guard_done(|| {
        let tap = handles::get::<OpenTap>(tap)?;
        let mut state = tap.state.lock();
        state.phase = Phase::Reading;
        state.picks.iter_mut().for_each(Vec::clear);
        state.fault = None;
        Ok(())
    })
}

/// Stops reading after a llama_decode() of `n_tokens` tokens and checks that every layer showed every token. Then
/// eldr_counts_add_tap() and eldr_cache_add_tap() take what they want of it. Any thread.
///
/// The picks are in the order of the ubatches' columns: that of the batch if it holds one sequence, or if the context
/// has a unified KV cache. Several sequences in one batch without one are regrouped by llama.cpp: decode them apart.
/// Errors: ELDR_STATUS_LAYOUT if the layout is not that of the ggml that runs, ELDR_STATUS_TAP if picks are missing or
/// are none.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_tap_end(tap: *mut TapHandle, n_tokens: usize) -> Status {
    guard_done(|| handles::get::<OpenTap>(tap)?.end(n_tokens))
}

/// Frees the handle; NULL is let pass. A context that still has the tap may decode: it is not listened to. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_tap_free(tap: *mut TapHandle) -> Status {
    guard_done(|| handles::remove::<OpenTap>(tap).map(drop))
}
