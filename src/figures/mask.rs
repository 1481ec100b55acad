//! How rho grows and falls as layers are added to the mask.
//!
//! Never chooses layers.

use serde::{Deserialize, Serialize};

use super::stats::round;
use crate::{calibrate::CalibrationReport, types::MoeShape};

/// Rho against the number of kept layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RhoCurve {
    /// llama.cpp's numbers of the layers, in the order they were chosen.
    pub layers: Vec<u32>,
    /// Rho with the first 1, 2, .. of them.
    pub rho: Vec<f64>,
    /// How many are kept (N*).
    pub n_kept: usize,
    /// Rho with every usable layer.
    pub rho_all_layers: Option<f64>,
}

impl RhoCurve {
    pub(super) fn of(report: &CalibrationReport, shape: &MoeShape) -> Self {
        Self {
            layers: report.layer_order.iter().map(|&row| shape.layers[row as usize]).collect(),
            rho: report.rho_curve.iter().copied().map(round).collect(),
            n_kept: report.layers.len(),
            rho_all_layers: report.rho_all_layers.map(round),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::figures::{Extras, planted::Planted};

    #[test]
    fn the_curve_peaks_where_layers_are_kept() {
        let data = Planted::default().report(Extras::default());
        let mask = &data.mask;
        assert_eq!((mask.layers.len(), mask.rho.len()), (4, 4));
        assert_eq!(mask.rho[mask.n_kept - 1].to_bits(), data.summary.rho.to_bits());
        assert!(mask.rho.iter().all(|&rho| rho <= data.summary.rho));
        assert_eq!(mask.rho_all_layers, mask.rho.last().copied());
    }
}
