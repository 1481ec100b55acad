//! Rho under each transform of the counts.
//!
//! Never sorts them: they stand in the order they were compared.

use super::{
    plot::{Scale, WIDTH},
    section::{Section, Table},
    svg::Svg,
    text::{clip, escape, fixed, n_of, name},
};
use crate::figures::{Figure, ReportData, TransformRho};

const ID: &str = "transforms";
const TITLE: &str = "How to weigh the counts";
const ROW: f64 = 27.0;
const LEFT: f64 = 108.0;

pub(super) fn section(data: &ReportData) -> Section {
    let transforms = match &data.transforms {
        Figure::Data(transforms) => transforms,
        Figure::LeftOut(why) => return Section::left_out(ID, TITLE, why),
    };
    let best = best(transforms);
    let mut table = Table::new(&["transform", "rho", "layers kept"]);
    for transform in transforms {
        table.rows.push(vec![name(&transform.name), fixed(transform.rho, 4), transform.n_layers.to_string()]);
    }
    let lead = format!(
        "{} ranks pairs of requests best, with rho&nbsp;=&nbsp;{} over {}.",
        name(&transforms[best].name),
        fixed(transforms[best].rho, 3),
        escape(&n_of(transforms[best].n_layers, "layer"))
    );
    let note =
        "Rho is Spearman&rsquo;s correlation, over all pairs of requests (of 2,048 drawn from more), of how far apart their signatures are and \
                how far apart their decode picks are; each transform with the mask that suits it best."
            .to_owned();
    Section { id: ID, title: TITLE, lead, note, drawings: vec![drawing(transforms, best)], table }
}

/// The first of the highest.
fn best(transforms: &[TransformRho]) -> usize {
    (1..transforms.len()).fold(0, |best, at| if transforms[at].rho > transforms[best].rho { at } else { best })
}

fn drawing(transforms: &[TransformRho], best: usize) -> String {
    let mut svg = Svg::new(WIDTH, ROW * transforms.len() as f64 + 8.0);
    let low = transforms.iter().map(|t| t.rho).fold(0.0, f64::min);
    let high = transforms.iter().map(|t| t.rho).fold(0.0, f64::max).max(low + 1e-6);
    let scale = Scale::linear((low, high), (LEFT, WIDTH - 96.0));
    let zero = scale.at(0.0);
    for (at, transform) in transforms.iter().enumerate() {
        let y = 4.0 + ROW * at as f64;
        let (class, text) = if at == best { ("bar1", "l b") } else { ("bar0", "l") };
        let end = scale.at(transform.rho);
        svg.rect(class, (zero.min(end), y), ((end - zero).abs().max(0.5), ROW - 9.0));
        svg.text(&format!("{text} e"), (LEFT - 8.0, y + 13.0), &clip(&transform.name, 17));
        svg.text(text, (zero.max(end) + 6.0, y + 13.0), &fixed(transform.rho, 3));
        svg.text("t e", (WIDTH, y + 13.0), &n_of(transform.n_layers, "layer"));
    }
    svg.line("axis", (zero, 0.0), (zero, ROW * transforms.len() as f64 + 2.0));
    let numbers: Vec<String> = transforms.iter().map(|t| format!("{} {}", t.name, fixed(t.rho, 3))).collect();
    svg.finish(ID, "Rho under each transform of the counts", &format!("{}.", numbers.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_the_highest_is_best() {
        let of = |rhos: &[f64]| -> Vec<TransformRho> {
            rhos.iter().map(|&rho| TransformRho { name: "x".into(), rho, n_layers: 1 }).collect()
        };
        assert_eq!((best(&of(&[0.1, 0.5, 0.5])), best(&of(&[-0.1]))), (1, 0));
    }
}
