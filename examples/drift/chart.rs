//! Two numbers of each policy in each scenario as one SVG, with their intervals.

use std::{error::Error, path::Path};

use eldr::sim::Interval;
use plotters::{
    prelude::*,
    style::text_anchor::{HPos, Pos, VPos},
};

/// A mark on a line of its own, in both panels.
pub struct Mark {
    pub group: String,
    pub name: String,
    pub left: Interval,
    pub right: Interval,
}

const COLOURS: [RGBColor; 6] = [
    RGBColor(0x8a, 0x8f, 0x98),
    RGBColor(0xd0, 0x8a, 0x2e),
    RGBColor(0x2e, 0x96, 0x7d),
    RGBColor(0x3b, 0x7d, 0xc4),
    RGBColor(0x8e, 0x5a, 0xb0),
    RGBColor(0x22, 0x22, 0x22),
];
const SHOWN: [&str; 6] = ["round_robin", "band 0.1", "marginal", "marginal +refit", "clairvoyant", "best partition"];
const LEFT: i32 = 130;
const WIDTH: i32 = 420;
const HEAD: i32 = 64;
/// A mark's line.
const LINE: i32 = 13;
/// Percent at either end.
const RANGE: (f64, f64) = (-20.0, 20.0);

/// Draws the marks of the policies that are compared, or all where it is not them.
pub fn draw(path: &Path, titles: [&str; 2], marks: &[Mark]) -> Result<(), Box<dyn Error>> {
    let known = marks.iter().any(|mark| mark.name == SHOWN[3]);
    let rows: Vec<&Mark> = marks.iter().filter(|mark| !known || SHOWN.contains(&mark.name.as_str())).collect();
    let n_scenarios = rows.windows(2).filter(|pair| pair[0].group != pair[1].group).count() + 1;
    // Where marks have names of their own, a scenario's name is a line above them.
    let n_head = if known { 1_usize } else { 2 };
    let height = HEAD + LINE * i32::try_from(rows.len() + n_head * n_scenarios)? + 30;
    let root = SVGBackend::new(path, ((2 * (LEFT + WIDTH)) as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, title) in (0..).zip(titles) {
        let left = panel * (LEFT + WIDTH);
        let x = |percent: f64| {
            let share = (percent.clamp(RANGE.0, RANGE.1) - RANGE.0) / (RANGE.1 - RANGE.0);
            left + LEFT + (share * f64::from(WIDTH - 30)) as i32
        };
        root.draw(&Text::new(title, (left + LEFT, 14), ("sans-serif", 15)))?;
        for percent in [-10.0, 0.0, 10.0, 20.0] {
            let line = vec![(x(percent), HEAD - 14), (x(percent), height - 20)];
            root.draw(&PathElement::new(line, if percent == 0.0 { BLACK } else { RGBColor(0xdd, 0xdd, 0xdd) }))?;
            let centre = ("sans-serif", 12).into_font().into_text_style(&root).pos(Pos::new(HPos::Center, VPos::Top));
            root.draw(&Text::new(format!("{percent:+}"), (x(percent), HEAD - 28), centre))?;
        }
        let (mut y, mut nth_of_group) = (HEAD, 0);
        for (at, row) in rows.iter().enumerate() {
            if at == 0 || rows[at - 1].group != row.group {
                y += LINE;
                root.draw(&Text::new(row.group.clone(), (left + 8, y - 6), ("sans-serif", 13)))?;
                y += if known { 0 } else { LINE };
                nth_of_group = 0;
            }
            let nth = SHOWN.iter().position(|&shown| shown == row.name);
            let colour = COLOURS[nth.unwrap_or(nth_of_group % COLOURS.len())];
            nth_of_group += 1;
            let Interval { mean, low, high } = if panel == 0 { row.left } else { row.right };
            root.draw(&PathElement::new(vec![(x(low), y), (x(high), y)], colour))?;
            root.draw(&Circle::new((x(mean), y), 4, colour.filled()))?;
            if !(RANGE.0..=RANGE.1).contains(&mean) {
                root.draw(&Text::new(format!("{mean:+.0}"), (x(mean) + 8, y - 6), ("sans-serif", 11)))?;
            }
            if !known {
                root.draw(&Text::new(row.name.clone(), (left + 20, y - 6), ("sans-serif", 11)))?;
            }
            y += LINE;
        }
    }
    for (nth, (name, colour)) in (0..).zip(SHOWN.iter().zip(COLOURS)).filter(|_| known) {
        let at = (LEFT + nth * 150, height - 12);
        root.draw(&Circle::new((at.0 - 10, at.1 + 4), 4, colour.filled()))?;
        root.draw(&Text::new((*name).to_owned(), at, ("sans-serif", 13)))?;
    }
    root.present()?;
    Ok(())
}
