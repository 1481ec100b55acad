//! How a message shows what somebody else wrote: on one line, harmless to a terminal, and not for ever.
//!
//! Never changes what is stored or compared, only what is read by people.

use std::fmt::{Display, LowerExp};

/// Characters of a quoted text at most; a SHA-256 fits.
const MOST: usize = 72;

/// A text for the middle of a sentence: as [`visible`], and cut after 72 characters, which `..` tells.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}..", visible(&text[..end])),
        None => visible(text),
    }
}

/// A text that can not disturb a terminal or break a line: control characters, line separators and marks that turn the
/// direction of writing become escapes.
pub fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        if disturbs(c) { visible.extend(c.escape_default()) } else { visible.push(c) }
    }
    visible
}

fn disturbs(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A number as people write it: `1e-300`, not three hundred digits.
pub fn shown_number<T: Copy + Display + LowerExp + Into<f64>>(number: T) -> String {
    let size: f64 = number.into().abs();
    if size.is_finite() && size != 0.0 && !(1e-5..1e12).contains(&size) {
        format!("{number:e}")
    } else {
        number.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Symptom: an id of a workload coloured the terminal and broke the error that named it.
    #[test]
    fn what_would_disturb_a_terminal_is_escaped() {
        assert_eq!(shown("a\u{1b}[31m\nz\u{9b}\u{7f}"), "a\\u{1b}[31m\\nz\\u{9b}\\u{7f}");
        assert_eq!(shown("\u{202e}\u{2028}\u{2066}"), "\\u{202e}\\u{2028}\\u{2066}");
        assert_eq!(shown("\u{43c} \u{1f600}\"'\\"), "\u{43c} \u{1f600}\"'\\");
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let fits = "\u{e9}".repeat(MOST);
        assert_eq!(shown(&fits), fits);
        assert_eq!(shown(&format!("{fits}x")), format!("{fits}.."));
        let lines = "\n".repeat(MOST + 1);
        assert_eq!(shown(&lines), format!("{}..", "\\n".repeat(MOST)));
        assert_eq!(visible(&format!("{fits}x\t")), format!("{fits}x\\t"));
    }

    // Symptom: `--rate 1e-300` was answered with three hundred digits.
    #[test]
    fn extreme_numbers_are_short() {
        for (number, want) in [
            (1e-300, "1e-300"),
            (-1.7e300, "-1.7e300"),
            (0.0, "0"),
            (-1.0, "-1"),
            (0.05, "0.05"),
            (123_456.5, "123456.5"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "NaN"),
        ] {
            assert_eq!(shown_number(number), want);
        }
        assert_eq!((shown_number(0.1f32), shown_number(1e-40f32)), ("0.1".to_owned(), "1e-40".to_owned()));
    }
}
