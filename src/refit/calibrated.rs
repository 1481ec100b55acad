//! A refitter that starts from a calibration.
//!
//! Never reads a file: the calibration is there.

use std::sync::Arc;

use crate::{
    calibrate::Calibration,
    refit::{Reads, RefitConfig, RefitError, Refitter},
    sim::{Compared, Verdict},
    types::WorkerId,
};

impl Refitter {
    /// A refitter for the workers of a calibration, which have `n_slots` slots each. Their shares are in proportion to the
    /// calibration's capacities, or else to their slots; what steps are expected to read is what its verdict found,
    /// unless `config` says.
    ///
    /// # Errors
    /// Settings that can not work.
    pub fn of_calibration(
        mut config: RefitConfig,
        calibration: &Calibration,
        n_slots: &[u32],
    ) -> Result<Self, RefitError> {
        if let (None, Some(verdict)) = (config.expected_reads, Verdict::of(calibration)) {
            let of = |compared: &Compared| compared.locality_band;
            config.expected_reads = Some(Reads { distinct: of(&verdict.experts_per_step), batch: of(&verdict.batch) });
        }
        let mut refitter = Self::new(config, Arc::new(calibration.centroids.clone()))?;
        for (index, &weight) in calibration.capacity.as_deref().unwrap_or(n_slots).iter().enumerate() {
            refitter.set_weight(WorkerId(index as u32), weight.max(1));
        }
        Ok(refitter)
    }
}
