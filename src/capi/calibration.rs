use std::{ffi::c_char, mem::MaybeUninit, path::Path, sync::Arc};

use ndarray::Array2;

use super::{
    CalibrationHandle, Status,
    args::{self, FromC, Growing},
    event::forever,
    failure::{Failure, guard_done},
    handles::{self, Class},
};
use crate::{
    calibrate::{Calibration, TauOrigin, decode},
    engine::read_calibration,
    route::LocalityBandParams,
    types::MoeShape,
};

/// Layers of a model, and experts of all its layers, that no model has: a number beyond was never set, and would be
/// asked of the memory.
const MAX_LAYERS: u32 = 1 << 16;
const MAX_EXPERTS: usize = 1 << 24;

pub(super) struct OpenCalibration(pub(super) Arc<Basis>);

/// A calibration, and the layers whose picks are counted under it.
pub(super) struct Basis {
    pub(super) calibration: Calibration,
    /// MoE layers, ascending: those of the mask, or all usable ones.
    pub(super) layers: Vec<u32>,
}

impl Basis {
    /// Counts what signatures are made of.
    pub(super) fn of_mask(calibration: Calibration) -> Self {
        Self { layers: calibration.layers.clone(), calibration }
    }

    /// Counts all that a prompt shows.
    fn of_usable(calibration: Calibration) -> Self {
        Self { layers: calibration.shape.usable(), calibration }
    }

    pub(super) fn shape(&self) -> &MoeShape {
        &self.calibration.shape
    }
}

impl Class for OpenCalibration {
    const NAME: &'static str = "eldr_calibration";
    type Handle = CalibrationHandle;
}

/// What an eldr_calibration was made for. Set `size` to sizeof(eldr_calibration_facts) before it is filled.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CalibrationFacts {
    /// sizeof(eldr_calibration_facts).
    pub size: usize,
    /// Decode workers: centroid i belongs to worker i. 0 if there are no centroids.
    pub n_workers: u32,
    /// Layers of the model, dense ones too.
    pub n_layer: u32,
    /// Layers whose picks are wanted: those a signature is made of, or all that a prompt shows.
    pub n_layer_used: u32,
    /// Experts a layer.
    pub n_expert: u32,
    /// Experts a token picks in a layer.
    pub n_expert_used: u32,
    /// Width of the locality band it was made with.
    pub tau: f32,
    /// How well picks in prefill tell picks in decode: a rank correlation, 1 is perfectly.
    pub rho: f64,
    /// What the model it was made for is told by. Lives for ever.
    pub fingerprint: *const c_char,
}

impl Growing for CalibrationFacts {
    const NAME: &'static str = "eldr_calibration_facts";
    const FIRST_SIZE: usize = 48;

    fn defaults() -> Self {
        Self {
            size: size_of::<Self>(),
            n_workers: 0,
            n_layer: 0,
            n_layer_used: 0,
            n_expert: 0,
            n_expert_used: 0,
            tau: 0.0,
            rho: 0.0,
            fingerprint: c"".as_ptr(),
        }
    }
}

/// Reads a calibration file into a new handle in `out`, which the caller frees. Any thread.
///
/// Errors: ELDR_STATUS_FILE if it can not be read, ELDR_STATUS_CALIBRATION if it is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_open(
    path: *const c_char,
    out: Option<&mut MaybeUninit<*mut CalibrationHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        // SAFETY: the caller passes a string.
        let path = unsafe { args::text(path, "path") }?;
        let basis = Basis::of_mask(read_calibration(Path::new(path))?);
        out.write(handles::insert(OpenCalibration(Arc::new(basis))));
        Ok(())
    })
}

/// Like eldr_calibration_open(), from the file's `n_bytes` bytes in memory, which are not kept. Any thread.
///
/// Errors: ELDR_STATUS_CALIBRATION if they are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_read(
    bytes: *const u8,
    n_bytes: usize,
    out: Option<&mut MaybeUninit<*mut CalibrationHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        // SAFETY: the caller passes `n_bytes` bytes.
        let bytes = unsafe { args::values(bytes, n_bytes, "bytes") }?;
        let calibration = decode(bytes).map_err(|error| Failure::new(Status::Calibration, error))?;
        out.write(handles::insert(OpenCalibration(Arc::new(Basis::of_mask(calibration)))));
        Ok(())
    })
}

/// Opens in `out`, which the caller frees, the same calibration for counts, taps and caches of every layer that a prompt
/// shows, not only of those signatures are made of: what the policy `marginal_cost` predicts from. Any thread.
///
/// What was opened under one of the two does not go with what was opened under the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_widen(
    calibration: *const CalibrationHandle,
    out: Option<&mut MaybeUninit<*mut CalibrationHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        let basis = Basis::of_usable(handles::get::<OpenCalibration>(calibration)?.0.calibration.clone());
        out.write(handles::insert(OpenCalibration(Arc::new(basis))));
        Ok(())
    })
}

/// A model's experts. Fill it with eldr_model_shape_init() first.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ModelShape {
    /// sizeof(eldr_model_shape).
    pub size: usize,
    /// llama.cpp's numbers of the layers that have experts, ascending; NULL is all layers. Read before the call returns.
    pub layers: *const u32,
    /// How many they are.
    pub n_layers: usize,
    /// Layers of the model, dense ones too.
    pub n_layer: u32,
    /// Experts a layer.
    pub n_expert: u32,
    /// Experts a token picks in a layer.
    pub n_expert_used: u32,
    /// 0 for now.
    pub reserved: u32,
}

// SAFETY: repr(C); numbers, and a pointer that may be NULL.
unsafe impl FromC for ModelShape {}

impl Growing for ModelShape {
    const NAME: &'static str = "eldr_model_shape";
    const FIRST_SIZE: usize = 40;

    fn defaults() -> Self {
        let layers = std::ptr::null();
        Self { size: size_of::<Self>(), layers, n_layers: 0, n_layer: 0, n_expert: 0, n_expert_used: 0, reserved: 0 }
    }
}

impl ModelShape {
    /// # Safety
    /// `layers` is NULL or points to `n_layers` numbers.
    unsafe fn shape(&self) -> Result<MoeShape, Failure> {
        let Self { n_layer, n_expert, n_expert_used, .. } = *self;
        let refuse = |why: String| Err(Failure::new(Status::Argument, why));
        if n_layer > MAX_LAYERS {
            return refuse(format!("no model has {n_layer} layers; pass how many there are, at most {MAX_LAYERS}"));
        }
        let layers = if self.layers.is_null() {
            (0..n_layer).collect()
        } else {
            // SAFETY: passed on.
            unsafe { args::values(self.layers, self.n_layers, "layers") }?.to_vec()
        };
        if layers.is_empty() || layers.iter().any(|&layer| layer >= n_layer) || !layers.is_sorted_by(|a, b| a < b) {
            return refuse(format!(
                "layers must be ascending numbers below n_layer, {n_layer}; at least one has experts"
            ));
        }
        if !(1..=1 << 16).contains(&n_expert) || !(1..=n_expert).contains(&n_expert_used) {
            return refuse(format!(
                "a token can not pick {n_expert_used} of {n_expert} experts; there are 1 to 65536, and one picks 1 to all"
            ));
        }
        if layers.len() * n_expert as usize > MAX_EXPERTS {
            return refuse(format!(
                "{} layers of {n_expert} experts are more than {MAX_EXPERTS} experts together; pass those of the model",
                layers.len()
            ));
        }
        Ok(MoeShape { layers, n_layer, n_expert, n_expert_used })
    }
}

/// Fills `shape`, of `size` bytes (sizeof(eldr_model_shape)), with nothing; the numbers are the host's. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_model_shape_init(shape: *mut ModelShape, size: usize) -> Status {
    // SAFETY: the caller passes a struct of `size` bytes.
    guard_done(|| unsafe { args::write_defaults(shape, size, "shape") })
}

/// Opens in `out`, which the caller frees, what is known of a model that was never calibrated: its experts. Any thread.
///
/// Under it all layers that a prompt shows are counted and nothing has a signature; it has no centroids, so a router of
/// it is told its number of workers. The policy `marginal_cost` needs no more.
/// Errors: ELDR_STATUS_ARGUMENT for a shape no model has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_of_shape(
    shape: *const ModelShape,
    out: Option<&mut MaybeUninit<*mut CalibrationHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        // SAFETY: the caller passes a struct whose size it set.
        let shape = unsafe { args::read(shape, "shape") }?;
        // SAFETY: the caller passes `n_layers` numbers or NULL.
        let shape = unsafe { shape.shape() }?;
        out.write(handles::insert(OpenCalibration(Arc::new(Basis::of_usable(bare(shape))))));
        Ok(())
    })
}

/// A calibration of no layers, from no requests, for no workers.
fn bare(shape: MoeShape) -> Calibration {
    Calibration {
        idf: Array2::zeros((shape.n_layer_moe(), shape.n_expert as usize)),
        shape,
        fingerprint: String::new(),
        layers: Vec::new(),
        centroids: Array2::zeros((0, 0)),
        n_requests: 0,
        n_tokens: 0,
        rho: 0.0,
        tau: LocalityBandParams::default().tau,
        tau_origin: TauOrigin::Default,
        capacity: None,
        cost: 0.0,
        seed: 0,
        load_model: None,
        verdict: None,
    }
}

/// Fills `out`, whose `size` is set, with what the calibration was made for. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_get_facts(
    calibration: *const CalibrationHandle,
    out: *mut CalibrationFacts,
) -> Status {
    guard_done(|| {
        let basis = &handles::get::<OpenCalibration>(calibration)?.0;
        let Basis { calibration, layers } = basis.as_ref();
        let shape = basis.shape();
        let facts = CalibrationFacts {
            n_workers: calibration.n_workers() as u32,
            n_layer: shape.n_layer,
            n_layer_used: layers.len() as u32,
            n_expert: shape.n_expert,
            n_expert_used: shape.n_expert_used,
            tau: calibration.tau,
            rho: calibration.rho,
            fingerprint: forever(&calibration.fingerprint).as_ptr(),
            ..CalibrationFacts::defaults()
        };
        // SAFETY: the caller passes a struct whose size it set.
        unsafe { args::fill(out, &facts, "out") }
    })
}

/// Copies the llama.cpp numbers of the layers whose picks are wanted, ascending, to `layers`, which has room for `room`;
/// writes to `n`, unless it is NULL, how many there are. Any thread.
///
/// Errors: ELDR_STATUS_BUFFER if there is too little room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_get_layers(
    calibration: *const CalibrationHandle,
    layers: *mut u32,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard_done(|| {
        let numbers = layer_numbers(&handles::get::<OpenCalibration>(calibration)?.0);
        // SAFETY: the caller says that there is room for `room`.
        unsafe { args::copy_out(&numbers, layers, room, n) }
    })
}

/// Frees the handle; NULL is let pass. What was made from it stays usable. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_calibration_free(calibration: *mut CalibrationHandle) -> Status {
    guard_done(|| handles::remove::<OpenCalibration>(calibration).map(drop))
}

/// llama.cpp's numbers of the counted layers.
pub(super) fn layer_numbers(basis: &Basis) -> Vec<u32> {
    basis.layers.iter().map(|&row| basis.shape().layers[row as usize]).collect()
}

/// The position of llama.cpp's layer `number` among the counted ones.
pub(super) fn position(basis: &Basis, number: u32) -> Result<usize, Failure> {
    let numbers = layer_numbers(basis);
    numbers.iter().position(|&layer| layer == number).ok_or_else(|| {
        let why = format!("layer {number} is not one the calibration uses; give the picks of {numbers:?} only");
        Failure::new(Status::Argument, why)
    })
}

/// Refuses what counts other layers or experts.
pub(super) fn check_same(a: &Basis, b: &Basis, what: &str) -> Result<(), Failure> {
    if a.layers == b.layers && a.shape() == b.shape() { Ok(()) } else { Err(mismatch(what)) }
}

/// Refuses signatures of other layers or experts.
pub(super) fn check_same_mask(a: &Basis, b: &Basis, what: &str) -> Result<(), Failure> {
    let is_same = a.calibration.layers == b.calibration.layers && a.shape() == b.shape();
    if is_same { Ok(()) } else { Err(mismatch(what)) }
}

fn mismatch(what: &str) -> Failure {
    let why = format!("the {what} is of a calibration with other layers or experts; use one calibration for both");
    Failure::new(Status::Mismatch, why)
}

/// Picks as unsigned ids, or which of them is no expert.
pub(super) fn experts(ids: &[i32], n_expert: u32) -> Result<Vec<u32>, Failure> {
    let expert = |&id: &i32| {
        u32::try_from(id).ok().filter(|&id| id < n_expert).ok_or_else(|| {
            Failure::new(Status::Argument, format!("a token picked expert {id}; the model has 0 to {}", n_expert - 1))
        })
    };
    ids.iter().map(expert).collect()
}
