//! A few SVG shapes, written as text.
//!
//! Never names a colour: shapes have classes, and the page's style sheet has the colours.

use std::fmt::Write as _;

use super::text::escape;

/// A drawing under way. Lengths are in its own units; the page scales it to the column's width.
///
/// Plotting crates write each colour into the shape, where neither a dark page nor print can change it; a class can
/// follow the style sheet's variables.
pub(super) struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// What a point is drawn as, so that colour is not all that tells labels apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Circle,
    Square,
    Triangle,
    Diamond,
    Wedge,
    Plus,
    Cross,
    Bar,
}

impl Shape {
    const ALL: [Self; 8] =
        [Self::Circle, Self::Square, Self::Triangle, Self::Diamond, Self::Wedge, Self::Plus, Self::Cross, Self::Bar];

    /// The shape of the label at a place.
    pub(super) fn of_label(place: usize) -> Self {
        Self::ALL[place % Self::ALL.len()]
    }

    /// Its outline about 0; `r` is half its height.
    fn corners(self, r: f64) -> Vec<(f64, f64)> {
        let thin = 0.36 * r;
        match self {
            Self::Circle => Vec::new(),
            Self::Square => vec![(-0.88, -0.88), (0.88, -0.88), (0.88, 0.88), (-0.88, 0.88)],
            Self::Triangle => vec![(0.0, -1.1), (1.05, 0.8), (-1.05, 0.8)],
            Self::Wedge => vec![(0.0, 1.1), (1.05, -0.8), (-1.05, -0.8)],
            Self::Diamond => vec![(0.0, -1.25), (1.25, 0.0), (0.0, 1.25), (-1.25, 0.0)],
            Self::Bar => vec![(-1.2, -0.45), (1.2, -0.45), (1.2, 0.45), (-1.2, 0.45)],
            Self::Plus | Self::Cross => {
                let (r, t) = (1.2, thin / r);
                let arms = [
                    (-t, -r),
                    (t, -r),
                    (t, -t),
                    (r, -t),
                    (r, t),
                    (t, t),
                    (t, r),
                    (-t, r),
                    (-t, t),
                    (-r, t),
                    (-r, -t),
                    (-t, -t),
                ];
                let half = std::f64::consts::FRAC_1_SQRT_2;
                let turn = |(x, y): (f64, f64)| ((x - y) * half, (x + y) * half);
                if self == Self::Plus { arms.to_vec() } else { arms.map(turn).to_vec() }
            }
        }
        .into_iter()
        .map(|(x, y)| (x * r, y * r))
        .collect()
    }
}

impl Svg {
    pub(super) fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    pub(super) fn rect(&mut self, class: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
        let (x, y, width, height) = (number(x), number(y), number(width), number(height));
        self.push(format_args!("<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"));
    }

    /// Many rectangles of one size as one shape.
    pub(super) fn cells(&mut self, class: &str, places: &[(f64, f64)], (width, height): (f64, f64)) {
        if places.is_empty() {
            return;
        }
        let mut d = String::new();
        for &(x, y) in places {
            let (x, y, width, height) = (number(x), number(y), number(width), number(height));
            let _ = write!(d, "M{x} {y}h{width}v{height}h-{width}z");
        }
        self.push(format_args!("<path class=\"{class}\" d=\"{d}\"/>"));
    }

    pub(super) fn line(&mut self, class: &str, (x1, y1): (f64, f64), (x2, y2): (f64, f64)) {
        let (x1, y1, x2, y2) = (number(x1), number(y1), number(x2), number(y2));
        self.push(format_args!("<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>"));
    }

    pub(super) fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        let points: Vec<String> = points.iter().map(|&(x, y)| format!("{},{}", number(x), number(y))).collect();
        self.push(format_args!("<polyline class=\"{class}\" points=\"{}\"/>", points.join(" ")));
    }

    pub(super) fn circle(&mut self, class: &str, (x, y): (f64, f64), r: f64) {
        let (x, y, r) = (number(x), number(y), number(r));
        self.push(format_args!("<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{r}\"/>"));
    }

    pub(super) fn mark(&mut self, class: &str, shape: Shape, (x, y): (f64, f64), r: f64) {
        if shape == Shape::Circle {
            return self.circle(class, (x, y), r);
        }
        let mut d = String::new();
        for (at, (dx, dy)) in shape.corners(r).into_iter().enumerate() {
            let letter = if at == 0 { 'M' } else { 'L' };
            let _ = write!(d, "{letter}{} {}", number(x + dx), number(y + dy));
        }
        self.push(format_args!("<path class=\"{class}\" d=\"{d}z\"/>"));
    }

    /// Text on a base line. Classes `m` and `e` centre it or end it at `x`.
    pub(super) fn text(&mut self, class: &str, (x, y): (f64, f64), text: &str) {
        let (x, y, text) = (number(x), number(y), escape(text));
        self.push(format_args!("<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>"));
    }

    /// The drawing as an element. `id` is unique on the page; `title` names the drawing and `description` says what is
    /// to be seen, for those who do not see it.
    pub(super) fn finish(self, id: &str, title: &str, description: &str) -> String {
        let (width, height) = (number(self.width), number(self.height));
        format!(
            "<svg viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
             <title id=\"{id}-t\">{}</title><desc id=\"{id}-d\">{}</desc>{}</svg>\n",
            escape(title),
            escape(description),
            self.body
        )
    }

    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = self.body.write_fmt(element);
    }
}

/// Two decimals at most.
fn number(x: f64) -> String {
    let text = format!("{x:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0.0, -0.001, 1.0, 10.0, 2.5, -7.2468].map(number), ["0", "0", "1", "10", "2.5", "-7.25"]);
    }

    #[test]
    fn a_drawing_has_a_name_a_description_and_escaped_text() {
        let mut svg = Svg::new(10.0, 5.0);
        svg.rect("bar", (0.0, 1.0), (2.5, 3.0));
        svg.cells("n1", &[(1.0, 2.0), (3.0, 2.0)], (2.0, 1.0));
        svg.cells("n2", &[], (2.0, 1.0));
        svg.mark("c0", Shape::Triangle, (5.0, 5.0), 1.0);
        svg.text("l e", (9.0, 4.0), "a<b");
        assert_eq!(
            svg.finish("x", "T&t", "\"d\""),
            "<svg viewBox=\"0 0 10 5\" role=\"img\" aria-labelledby=\"x-t x-d\"><title id=\"x-t\">T&amp;t</title>\
             <desc id=\"x-d\">&quot;d&quot;</desc><rect class=\"bar\" x=\"0\" y=\"1\" width=\"2.5\" height=\"3\"/>\
             <path class=\"n1\" d=\"M1 2h2v1h-2zM3 2h2v1h-2z\"/><path class=\"c0\" d=\"M5 3.9L6.05 5.8L3.95 5.8z\"/>\
             <text class=\"l e\" x=\"9\" y=\"4\">a&lt;b</text></svg>\n"
        );
    }

    #[test]
    fn shapes_differ() {
        let outlines: Vec<_> = Shape::ALL.iter().map(|shape| shape.corners(2.0)).collect();
        for (at, outline) in outlines.iter().enumerate() {
            assert!(!outlines[..at].contains(outline));
        }
        assert_eq!(Shape::of_label(9), Shape::Square);
    }
}
