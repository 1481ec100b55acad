use std::{ffi::c_char, mem::MaybeUninit, path::Path, sync::Arc};

use super::{
    CalibrationHandle, Status,
    args::{self, Growing},
    event::forever,
    failure::{Failure, guard_done},
    handles::{self, Class},
};
use crate::{
    calibrate::{Calibration, decode},
    engine::read_calibration,
};

pub(super) struct OpenCalibration(pub(super) Arc<Calibration>);

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
    /// Decode workers: centroid i belongs to worker i.
    pub n_workers: u32,
    /// Layers of the model, dense ones too.
    pub n_layer: u32,
    /// Layers whose picks a signature is made of.
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
        out.write(handles::insert(OpenCalibration(Arc::new(read_calibration(Path::new(path))?))));
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
        out.write(handles::insert(OpenCalibration(Arc::new(calibration))));
        Ok(())
    })
}

/// Fills `out`, whose `size` is set, with what the calibration was made for. Any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_calibration_get_facts(
    calibration: *const CalibrationHandle,
    out: *mut CalibrationFacts,
) -> Status {
    guard_done(|| {
        let calibration = &handles::get::<OpenCalibration>(calibration)?.0;
        let shape = &calibration.shape;
        let facts = CalibrationFacts {
            n_workers: calibration.n_workers() as u32,
            n_layer: shape.n_layer,
            n_layer_used: calibration.layers.len() as u32,
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

/// llama.cpp's numbers of the masked layers.
pub(super) fn layer_numbers(calibration: &Calibration) -> Vec<u32> {
    calibration.layers.iter().map(|&row| calibration.shape.layers[row as usize]).collect()
}

/// The position in the mask of llama.cpp's layer `number`.
pub(super) fn position(calibration: &Calibration, number: u32) -> Result<usize, Failure> {
    let numbers = layer_numbers(calibration);
    numbers.iter().position(|&layer| layer == number).ok_or_else(|| {
        let why = format!("layer {number} is not one the calibration uses; give the picks of {numbers:?} only");
        Failure::new(Status::Argument, why)
    })
}

/// Refuses what was made with another calibration of other layers or experts.
pub(super) fn check_same(a: &Arc<Calibration>, b: &Arc<Calibration>, what: &str) -> Result<(), Failure> {
    if Arc::ptr_eq(a, b) || (a.layers == b.layers && a.shape == b.shape) {
        return Ok(());
    }
    let why = format!("the {what} is of a calibration with other layers or experts; use one calibration for both");
    Err(Failure::new(Status::Mismatch, why))
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
