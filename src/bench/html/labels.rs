//! The key of label colours and shapes.
//!
//! Never gives a label another place than the data does.

use super::{
    plot::WIDTH,
    svg::{Shape, Svg},
    text::clip,
};
use crate::figures::Labels;

const ROW: f64 = 17.0;
/// Entries beside one another.
const COLUMNS: usize = 4;

/// The labels, and perhaps "others".
pub(super) struct Legend {
    entries: Vec<(String, usize, String)>,
}

impl Legend {
    pub(super) fn of(labels: &Labels, with_others: bool) -> Self {
        let names = labels.names.iter().enumerate().map(|(place, name)| (format!("f{place}"), place, clip(name, 13)));
        let others = with_others.then(|| ("fo".to_owned(), 0, "others".to_owned()));
        Self { entries: names.chain(others).collect() }
    }

    pub(super) fn height(&self) -> f64 {
        if self.entries.is_empty() { 0.0 } else { self.entries.len().div_ceil(COLUMNS) as f64 * ROW + 8.0 }
    }

    /// Draws it from `x` to the right edge, with the points' shapes or as squares.
    pub(super) fn draw(&self, svg: &mut Svg, (x, y): (f64, f64), with_shapes: bool) {
        let step = (WIDTH - x) / COLUMNS as f64;
        for (at, (class, place, name)) in self.entries.iter().enumerate() {
            let (x, y) = (x + step * (at % COLUMNS) as f64, y + ROW * (at / COLUMNS) as f64);
            let shape = if with_shapes { Shape::of_label(*place) } else { Shape::Square };
            svg.mark(class, shape, (x + 5.0, y), 4.4);
            svg.text("l", (x + 15.0, y + 3.8), name);
        }
    }
}
