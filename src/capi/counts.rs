use std::{mem::MaybeUninit, sync::Arc};

use parking_lot::Mutex;

use super::{
    CalibrationHandle, CountsHandle, Status, TapHandle, args,
    calibration::{Basis, OpenCalibration, check_same, experts, position},
    failure::{Failure, guard_done},
    handles::{self, Class},
    tap::OpenTap,
};
use crate::signature::ExpertCounts;

/// Counts for the layers of a calibration that are counted.
pub(super) struct OpenCounts {
    pub(super) basis: Arc<Basis>,
    pub(super) counts: Mutex<ExpertCounts>,
}

impl Class for OpenCounts {
    const NAME: &'static str = "eldr_counts";
    type Handle = CountsHandle;
}

impl OpenCounts {
    /// Counts for these picks of whole tokens, in the layer at `position`.
    pub(super) fn add(&self, position: usize, experts: &[u32]) {
        self.counts.lock().add(self.basis.layers[position], experts);
    }

    /// Every layer must have counted the same tokens, k picks each.
    pub(super) fn n_tokens(&self) -> Result<u32, Failure> {
        let counts = self.counts.lock();
        let k = self.basis.shape().n_expert_used;
        let tokens = |&layer: &u32| counts.row(layer).map_or(0, |row| row.iter().sum::<u32>() / k);
        let n = self.basis.layers.first().map_or(0, tokens);
        for layer in &self.basis.layers {
            let found = tokens(layer);
            if found != n {
                let number = |row: u32| self.basis.shape().layers[row as usize];
                let why = format!(
                    "layer {} has counted {found} tokens and layer {} {n}; add every token's picks in all layers",
                    number(*layer),
                    number(self.basis.layers[0])
                );
                return Err(Failure::new(Status::Tap, why));
            }
        }
        Ok(n)
    }

    /// The counts with their tokens, if every layer has counted the same.
    pub(super) fn whole(&self) -> Result<ExpertCounts, Failure> {
        let n_tokens = self.n_tokens()?;
        let mut counts = self.counts.lock().clone();
        counts.add_tokens(n_tokens - counts.n_tokens());
        Ok(counts)
    }
}

/// Opens counts of no tokens yet in `out`, for the layers of a calibration; the caller frees them. Any thread; the
/// calibration's handle may be freed before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_counts_open(
    calibration: *const CalibrationHandle,
    out: Option<&mut MaybeUninit<*mut CountsHandle>>,
) -> Status {
    guard_done(|| {
        let out = args::need(out, "out")?;
        let basis = Arc::clone(&handles::get::<OpenCalibration>(calibration)?.0);
        let counts = Mutex::new(ExpertCounts::new(&basis.layers, basis.shape().n_expert));
        out.write(handles::insert(OpenCounts { basis, counts }));
        Ok(())
    })
}

/// Counts the picks of `n_tokens` tokens in llama.cpp's layer `layer`: `experts` has n_expert_used ids for each token.
/// Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a layer that the calibration does not use and for an id that is no expert; then
/// nothing is counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_counts_add(
    counts: *mut CountsHandle,
    layer: u32,
    experts: *const i32,
    n_tokens: usize,
) -> Status {
    guard_done(|| {
        let counts = handles::get::<OpenCounts>(counts)?;
        let shape = counts.basis.shape();
        let position = position(&counts.basis, layer)?;
        let n = n_tokens.saturating_mul(shape.n_expert_used as usize);
        // SAFETY: the caller passes k ids for each of `n_tokens` tokens.
        let ids = unsafe { args::values(experts, n, "experts") }?;
        counts.add(position, &self::experts(ids, shape.n_expert)?);
        Ok(())
    })
}

/// Counts the picks of `n_tokens` tokens from the `first`-th of the batch the tap has just read, in all layers. Any
/// thread.
///
/// Errors: ELDR_STATUS_TAP unless eldr_tap_end() has found the batch good, ELDR_STATUS_ARGUMENT for tokens the batch does
/// not have, ELDR_STATUS_MISMATCH for a tap of another calibration.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_counts_add_tap(
    counts: *mut CountsHandle,
    tap: *const TapHandle,
    first: usize,
    n_tokens: usize,
) -> Status {
    guard_done(|| {
        let counts = handles::get::<OpenCounts>(counts)?;
        let tap = handles::get::<OpenTap>(tap)?;
        check_same(&counts.basis, &tap.basis, "tap")?;
        tap.picks(first, n_tokens, |position, experts| counts.add(position, experts))
    })
}

/// Adds the counts `from` to the counts `to`. Any thread.
///
/// Errors: ELDR_STATUS_MISMATCH for counts of another calibration, ELDR_STATUS_ARGUMENT if a layer would have counted more
/// than 2^32 - 1 picks.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_counts_merge(to: *mut CountsHandle, from: *const CountsHandle) -> Status {
    guard_done(|| {
        let (to, from) = (handles::get::<OpenCounts>(to)?, handles::get::<OpenCounts>(from)?);
        check_same(&to.basis, &from.basis, "second eldr_counts")?;
        let from = from.counts.lock().clone();
        let mut to_counts = to.counts.lock();
        let sum =
            |counts: &ExpertCounts, layer| counts.row(layer).into_iter().flatten().map(|&n| u64::from(n)).sum::<u64>();
        if to.basis.layers.iter().any(|&layer| sum(&to_counts, layer) + sum(&from, layer) > u64::from(u32::MAX)) {
            let why = format!("a layer would have counted more than {} picks; merge fewer", u32::MAX);
            return Err(Failure::new(Status::Argument, why));
        }
        to_counts.merge(&from);
        Ok(())
    })
}

/// Counts no tokens any more. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_counts_clear(counts: *mut CountsHandle) -> Status {
    guard_done(|| {
        let counts = handles::get::<OpenCounts>(counts)?;
        *counts.counts.lock() = ExpertCounts::new(&counts.basis.layers, counts.basis.shape().n_expert);
        Ok(())
    })
}

/// Writes how many tokens were counted to `n_tokens`. Any thread.
///
/// Errors: ELDR_STATUS_TAP if the layers differ, because some token's picks were not added in every layer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_counts_get_tokens(
    counts: *const CountsHandle,
    n_tokens: Option<&mut MaybeUninit<u32>>,
) -> Status {
    guard_done(|| args::put(n_tokens, handles::get::<OpenCounts>(counts)?.n_tokens()?, "n_tokens"))
}

/// Copies the counts of all experts in llama.cpp's layer `layer` to `row`, which has room for `room`; writes to `n`,
/// unless it is NULL, how many there are. Any thread.
///
/// Errors: ELDR_STATUS_ARGUMENT for a layer that the calibration does not use, ELDR_STATUS_BUFFER for too little room.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn eldr_counts_get_row(
    counts: *const CountsHandle,
    layer: u32,
    row: *mut u32,
    room: usize,
    n: Option<&mut MaybeUninit<usize>>,
) -> Status {
    guard_done(|| {
        let counts = handles::get::<OpenCounts>(counts)?;
        let layer = counts.basis.layers[position(&counts.basis, layer)?];
        let counts = counts.counts.lock();
        // SAFETY: the caller says that there is room for `room`.
        unsafe { args::copy_out(counts.row(layer).unwrap_or_default(), row, room, n) }
    })
}

/// Frees the handle; NULL is let pass. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn eldr_counts_free(counts: *mut CountsHandle) -> Status {
    guard_done(|| handles::remove::<OpenCounts>(counts).map(drop))
}
