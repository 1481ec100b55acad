//! The callback that the host's llama.cpp calls for every node of its graph.
//!
//! Never stops a computation, and reads a tensor only after its layout has been proved.

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
};

use super::{
    Status, TapHandle, handles,
    layout::ggml_tensor,
    tap::{OpenTap, Phase, TapState},
};

const PREFIX: &[u8] = b"ffn_moe_topk-";

/// A ggml_backend_sched_eval_callback: `user` is an eldr_tap. For llama.cpp only, on the thread that decodes.
///
/// Answers `ask` with whether the node holds picks that are wanted, and always lets the computation go on. With a tap
/// that was freed it wants nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_tap_on_node(tensor: *mut ggml_tensor, ask: bool, user: *mut c_void) -> bool {
    let wants = catch_unwind(AssertUnwindSafe(|| {
        let Ok(tap) = handles::get::<OpenTap>(user.cast::<TapHandle>().cast_const()) else { return false };
        let mut state = tap.state.lock();
        if state.phase != Phase::Reading || state.fault.is_some() || tensor.is_null() {
            return false;
        }
        // SAFETY: ggml calls with a tensor of its graph, alive for the call.
        let answer = unsafe { on_node(&tap, &mut state, tensor, ask) };
        answer.unwrap_or_else(|fault| {
            state.fault = Some(fault);
            false
        })
    }));
    // After the node is computed, `false` would make ggml skip the rest of the graph.
    wants.unwrap_or(false) || !ask
}

/// # Safety
/// `tensor` is alive and of the ggml whose functions the tap has.
unsafe fn on_node(
    tap: &OpenTap,
    state: &mut TapState,
    tensor: *const ggml_tensor,
    ask: bool,
) -> Result<bool, (Status, String)> {
    // SAFETY: passed on.
    let name = unsafe { tap.layout.name(tensor, &tap.ggml) }.map_err(|why| (Status::Layout, why))?;
    let Some((layer, position)) = wanted(tap, name.to_bytes()) else { return Ok(false) };
    if ask {
        return Ok(true);
    }
    // SAFETY: passed on; its name was in its place.
    let node = unsafe { tap.layout.node(tensor, &tap.ggml) }.map_err(|why| (Status::Layout, why))?;
    let shape = tap.basis.shape();
    let k = shape.n_expert_used as usize;
    let fault = |why: String| (Status::Tap, format!("layer {layer}: {why}"));
    let (n_columns, stride) = node.columns(k, tap.layout.type_i32).map_err(fault)?;
    let Some(last) = n_columns.checked_sub(1) else { return Ok(true) };
    let n_ids = last * (stride / 4) + k;
    state.scratch.clear();
    state.scratch.resize(n_ids, -1);
    // SAFETY: the node is computed and has exactly so many bytes, as ggml has just confirmed; the scratch holds them.
    unsafe { (tap.ggml.tensor_get)(tensor, state.scratch.as_mut_ptr().cast(), 0, n_ids * 4) };
    for column in state.scratch.chunks(stride / 4) {
        for &id in &column[..k] {
            match u32::try_from(id) {
                Ok(expert) if expert < shape.n_expert => state.picks[position].push(expert),
                _ => return Err(fault(format!("a token picked expert {id} of {}", shape.n_expert))),
            }
        }
    }
    Ok(true)
}

/// The layer whose picks a node of this name holds, if they are wanted, and its position among the counted layers.
fn wanted(tap: &OpenTap, name: &[u8]) -> Option<(usize, usize)> {
    let digits = std::str::from_utf8(name.strip_prefix(PREFIX)?).ok()?;
    let layer: usize = digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())??;
    Some((layer, (*tap.wanted.get(layer)?)?))
}

#[cfg(test)]
mod tests {
    use std::{mem::MaybeUninit, ptr, sync::Arc};

    use ndarray::array;

    use super::*;
    use crate::{
        calibrate::{Calibration, TauOrigin},
        capi::{
            CalibrationHandle, TapParams, TensorLayout,
            args::Growing,
            calibration::{Basis, OpenCalibration},
            counts::{eldr_counts_add_tap, eldr_counts_get_row, eldr_counts_open},
            layout::tests::{Fake, get_name, layout, n_bytes, tensor_get},
            tap::{eldr_tap_begin, eldr_tap_end, eldr_tap_free, eldr_tap_open},
        },
        types::MoeShape,
    };

    fn calibration() -> *mut CalibrationHandle {
        handles::insert(OpenCalibration(Arc::new(Basis::of_mask(Calibration {
            shape: MoeShape { layers: vec![1, 2, 3], n_layer: 4, n_expert: 4, n_expert_used: 2 },
            fingerprint: "test".into(),
            idf: array![[1.0f32, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]],
            layers: vec![0, 1],
            centroids: array![[1.0f32, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]],
            n_requests: 1,
            n_tokens: 1,
            rho: 0.5,
            tau: 0.1,
            cost: 0.25,
            seed: 0,
            load_model: None,
            tau_origin: TauOrigin::Default,
            capacity: None,
            verdict: None,
        }))))
    }

    fn open(calibration: *const CalibrationHandle, layout: TensorLayout) -> (Status, *mut TapHandle) {
        let params = TapParams {
            calibration,
            layout,
            get_name: Some(get_name),
            get_bytes: Some(n_bytes),
            tensor_get: Some(tensor_get),
            ..TapParams::defaults()
        };
        let mut out = MaybeUninit::new(ptr::null_mut());
        // SAFETY: whole structs are passed.
        let status = unsafe { eldr_tap_open(&raw const params, Some(&mut out)) };
        // SAFETY: it was made with a value.
        (status, unsafe { out.assume_init() })
    }

    fn call(tap: *mut TapHandle, fake: &Fake, ask: bool) -> bool {
        // SAFETY: fakes are what the tap's functions read.
        unsafe { eldr_tap_on_node(fake.tensor().cast_mut(), ask, tap.cast()) }
    }

    fn run(tap: *mut TapHandle, nodes: &[Fake]) {
        for node in nodes {
            if call(tap, node, true) {
                assert!(call(tap, node, false));
            }
        }
    }

    #[test]
    fn picks_of_the_mask_are_read_by_their_stride() {
        let calibration = calibration();
        let (status, tap) = open(calibration, layout());
        assert_eq!(status, Status::Ok);
        let nodes = || {
            [
                Fake::new("ffn_moe_topk-1", 2, 4, vec![0, 1, 9, 9, 2, 3, 9, 9, 0, 2]),
                Fake::new("ffn_moe_topk-2", 2, 2, vec![3, 1, 3, 0, 3, 2]),
                Fake::new("ffn_moe_topk-3", 2, 4, vec![9, 9, 9, 9]),
                Fake::new("ffn_moe_topk-x", 2, 4, vec![9, 9, 9, 9]),
            ]
        };
        run(tap, &nodes());
        assert_eq!(eldr_tap_end(tap, 3), Status::Tap, "it was not told to read");
        assert_eq!(eldr_tap_begin(tap), Status::Ok);
        run(tap, &nodes());
        assert_eq!(eldr_tap_end(tap, 3), Status::Ok);
        let mut counts = MaybeUninit::uninit();
        // SAFETY: a place for a handle.
        assert_eq!(unsafe { eldr_counts_open(calibration, Some(&mut counts)) }, Status::Ok);
        // SAFETY: written above.
        let counts = unsafe { counts.assume_init() };
        assert_eq!(eldr_counts_add_tap(counts, tap, 1, 2), Status::Ok);
        assert_eq!(eldr_counts_add_tap(counts, tap, 2, 2), Status::Argument);
        let mut row = [0u32; 4];
        // SAFETY: there is room for four.
        assert_eq!(unsafe { eldr_counts_get_row(counts, 1, row.as_mut_ptr(), 4, None) }, Status::Ok);
        assert_eq!(row, [1, 0, 2, 1]);
        // SAFETY: as above.
        assert_eq!(unsafe { eldr_counts_get_row(counts, 2, row.as_mut_ptr(), 4, None) }, Status::Ok);
        assert_eq!(row, [1, 0, 1, 2]);
        // SAFETY: as above.
        assert_eq!(unsafe { eldr_counts_get_row(counts, 3, row.as_mut_ptr(), 4, None) }, Status::Argument);
    }

    #[test]
    fn missing_and_impossible_picks_are_faults() {
        let (_, tap) = open(calibration(), layout());
        let faults = [
            vec![Fake::new("ffn_moe_topk-1", 2, 2, vec![0, 1])],
            vec![Fake::new("ffn_moe_topk-1", 2, 2, vec![0, 4]), Fake::new("ffn_moe_topk-2", 2, 2, vec![0, 1])],
            vec![Fake::new("ffn_moe_topk-1", 3, 3, vec![0, 1, 2]), Fake::new("ffn_moe_topk-2", 2, 2, vec![0, 1])],
        ];
        for nodes in faults {
            assert_eq!(eldr_tap_begin(tap), Status::Ok);
            run(tap, &nodes);
            assert_eq!(eldr_tap_end(tap, 1), Status::Tap);
            assert_eq!(eldr_tap_end(tap, 1), Status::Tap, "a fault does not make the batch whole");
        }
    }

    #[test]
    fn a_layout_of_another_ggml_is_a_status_and_nothing_is_read() {
        let right = layout();
        let moved = TensorLayout { offset_name: 8, n_name: 40, ..right };
        assert_eq!(open(calibration(), TensorLayout { n_bytes: 8, ..right }).0, Status::Layout);
        let (status, tap) = open(calibration(), moved);
        assert_eq!((status, eldr_tap_begin(tap)), (Status::Ok, Status::Ok));
        let node = Fake::new("ffn_moe_topk-1", 2, 2, vec![0, 1]);
        assert!(!call(tap, &node, true) && call(tap, &node, false));
        assert_eq!(eldr_tap_end(tap, 1), Status::Layout);
    }

    #[test]
    fn a_tap_that_was_freed_wants_nothing_and_stops_nothing() {
        let (_, tap) = open(calibration(), layout());
        assert_eq!((eldr_tap_begin(tap), eldr_tap_free(tap)), (Status::Ok, Status::Ok));
        let node = Fake::new("ffn_moe_topk-1", 2, 2, vec![0, 1]);
        assert!(!call(tap, &node, true) && call(tap, &node, false));
        assert_eq!(eldr_tap_end(tap, 1), Status::Handle);
    }
}
