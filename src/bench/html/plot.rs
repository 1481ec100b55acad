//! Scales, ticks and axes.
//!
//! Never cuts an axis where a bar would need its zero.

use super::svg::Svg;

/// Width of a figure; the page has room for two side by side, and a phone shows one at about this size.
pub(super) const WIDTH: f64 = 400.0;

/// From a number to a place along an axis.
pub(super) struct Scale {
    from: (f64, f64),
    to: (f64, f64),
    warp: fn(f64) -> f64,
}

impl Scale {
    pub(super) fn linear(from: (f64, f64), to: (f64, f64)) -> Self {
        Self { from, to, warp: |x| x }
    }

    /// By square roots, which spreads small numbers.
    pub(super) fn root(from: (f64, f64), to: (f64, f64)) -> Self {
        Self { from, to, warp: |x| x.max(0.0).sqrt() }
    }

    pub(super) fn at(&self, x: f64) -> f64 {
        let (low, high) = ((self.warp)(self.from.0), (self.warp)(self.from.1));
        self.to.0 + ((self.warp)(x) - low) / (high - low) * (self.to.1 - self.to.0)
    }
}

/// Round numbers from at or below `low` to at or above `high`, about `n` steps of 1, 2 or 5 times a power of ten.
pub(in crate::bench) fn ticks(low: f64, high: f64, n: usize) -> Vec<f64> {
    let spread = (high - low).max(1e-9);
    let rough = spread / n.max(1) as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|m| m * power).find(|s| *s >= rough * 0.999).unwrap_or(rough);
    let first = (low / step + 1e-6).floor() as i64;
    let last = (high / step - 1e-6).ceil() as i64;
    (first..=last.max(first + 1)).map(|i| i as f64 * step).collect()
}

/// A plot's two scales and the lines around it.
pub(super) struct Frame {
    pub x: Scale,
    pub y: Scale,
}

impl Frame {
    /// A rule and a number for each tick of the vertical axis; its title stands above it.
    pub(super) fn rules(&self, svg: &mut Svg, ticks: &[f64], title: &str, label: impl Fn(f64) -> String) {
        let (left, right) = self.x.to;
        for &tick in ticks {
            let y = self.y.at(tick);
            svg.line("rule", (left, y), (right, y));
            svg.text("t e", (left - 6.0, y + 3.8), &label(tick));
        }
        svg.text("t", (0.0, 11.0), title);
    }

    /// A number below each tick of the horizontal axis, and its title below them.
    pub(super) fn feet(&self, svg: &mut Svg, ticks: &[f64], title: &str, label: impl Fn(f64) -> String) {
        let bottom = self.y.to.0;
        for &tick in ticks {
            svg.text("t m", (self.x.at(tick), bottom + 15.0), &label(tick));
        }
        svg.text("t e", (self.x.to.1, bottom + 31.0), title);
    }

    /// Those of `ticks`, ascending, whose numbers below the plot do not touch.
    pub(super) fn apart(&self, ticks: impl Iterator<Item = f64>) -> Vec<f64> {
        let mut apart: Vec<f64> = Vec::new();
        for tick in ticks {
            if apart.last().is_none_or(|&last| self.x.at(tick) - self.x.at(last) > 30.0) {
                apart.push(tick);
            }
        }
        apart
    }

    pub(super) fn place(&self, x: f64, y: f64) -> (f64, f64) {
        (self.x.at(x), self.y.at(y))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_hold_the_range() {
        let same = |got: Vec<f64>, want: &[f64]| {
            assert!(got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-12), "{got:?}");
        };
        same(ticks(0.0, 1.0, 5), &[0.0, 0.2, 0.4, 0.6, 0.8, 1.0]);
        same(ticks(-0.08, 0.09, 4), &[-0.1, -0.05, 0.0, 0.05, 0.1]);
        same(ticks(0.0, 37.0, 4), &[0.0, 10.0, 20.0, 30.0, 40.0]);
        assert!(ticks(3.0, 3.0, 4).len() >= 2);
    }

    #[test]
    fn ticks_that_would_touch_are_dropped() {
        let frame = Frame { x: Scale::linear((0.0, 1.0), (0.0, 100.0)), y: Scale::linear((0.0, 1.0), (1.0, 0.0)) };
        let apart = frame.apart([0.0, 0.25, 0.5, 0.75, 1.0].into_iter());
        assert_eq!(apart.iter().map(|x| (x * 100.0) as i32).collect::<Vec<_>>(), [0, 50, 100]);
    }

    #[test]
    fn scales_meet_their_ends() {
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-12, "{a} {b}");
        let scale = Scale::linear((0.0, 10.0), (200.0, 0.0));
        near(scale.at(0.0), 200.0);
        near(scale.at(2.5), 150.0);
        let root = Scale::root((0.0, 0.16), (0.0, 100.0));
        near(root.at(0.04), 50.0);
        near(root.at(0.16), 100.0);
    }
}
