//! Text and numbers as the page writes them.
//!
//! Never lets a label or a name become markup.

/// Text for HTML and SVG, between tags or in a quoted attribute. Control characters, which HTML forbids, become U+FFFD.
pub(in crate::bench) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            '\t' | '\n' | '\r' => safe.push(' '),
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// A name from outside as markup: escaped, and apart from the direction of the text around it.
pub(super) fn name(text: &str) -> String {
    format!("<bdi>{}</bdi>", escape(visible(text)))
}

/// Something to read where a name is blank.
fn visible(text: &str) -> &str {
    if text.trim().is_empty() { "(blank)" } else { text }
}

/// At most `width` columns of `text`; what is cut shows as an ellipsis.
pub(super) fn clip(text: &str, width: usize) -> String {
    // Scripts beyond Greek, Cyrillic and their neighbours are drawn about twice as wide as Latin.
    let columns = |c: char| if c >= '\u{1100}' { 2 } else { 1 };
    let text = visible(text);
    if text.chars().map(columns).sum::<usize>() <= width {
        return text.to_owned();
    }
    let mut left = width.saturating_sub(1);
    let kept = text.chars().take_while(|&c| {
        let fits = columns(c) <= left;
        left = left.saturating_sub(columns(c));
        fits
    });
    kept.chain(['\u{2026}']).collect()
}

/// A number with `digits` decimals and a real minus sign.
pub(super) fn fixed(x: f64, digits: usize) -> String {
    let text = format!("{:.digits$}", x.abs());
    let is_zero = text.bytes().all(|c| matches!(c, b'0' | b'.'));
    if x < 0.0 && !is_zero { format!("\u{2212}{text}") } else { text }
}

/// A number with two decimals, or a dash where there is none.
pub(super) fn maybe(x: Option<f64>) -> String {
    x.map_or_else(|| "\u{2013}".to_owned(), |x| fixed(x, 2))
}

/// A share in percent.
pub(super) fn percent(share: f64, digits: usize) -> String {
    format!("{}\u{a0}%", fixed(share * 100.0, digits))
}

/// A change in percent, with its sign.
pub(super) fn change(share: f64) -> String {
    let text = percent(share, 1);
    if share > 0.0 && text != percent(0.0, 1) { format!("+{text}") } else { text }
}

/// A count with its thousands apart.
pub(super) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 layer`, `2 layers`.
pub(super) fn n_of(n: usize, one: &str) -> String {
    format!("{} {one}{}", count(n as u64), if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_becomes_markup() {
        assert_eq!(escape("<b a='1'>&\"\n\0\u{7f}"), "&lt;b a=&#39;1&#39;&gt;&amp;&quot; \u{fffd}\u{fffd}");
        assert_eq!(name("\u{202e}a"), "<bdi>\u{202e}a</bdi>");
    }

    #[test]
    fn long_names_are_cut_by_columns() {
        assert_eq!(clip("medical", 7), "medical");
        assert_eq!(clip("medical", 6), "medic\u{2026}");
        assert_eq!(clip("\u{4e2d}\u{6587}\u{4e2d}", 6), "\u{4e2d}\u{6587}\u{4e2d}");
        assert_eq!(clip("\u{4e2d}\u{6587}\u{4e2d}", 5), "\u{4e2d}\u{6587}\u{2026}");
        assert_eq!(clip("ab", 0), "\u{2026}");
        assert_eq!((clip(" ", 9), name("")), ("(blank)".to_owned(), "<bdi>(blank)</bdi>".to_owned()));
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!((fixed(-0.004, 2), fixed(-1.25, 1)), ("0.00".to_owned(), "\u{2212}1.2".to_owned()));
        assert_eq!((change(0.081), change(-0.1)), ("+8.1\u{a0}%".to_owned(), "\u{2212}10.0\u{a0}%".to_owned()));
        assert_eq!((change(0.0), change(0.0001)), ("0.0\u{a0}%".to_owned(), "0.0\u{a0}%".to_owned()));
        assert_eq!([1, 999, 1000, 1_234_567].map(count), ["1", "999", "1,000", "1,234,567"]);
        assert_eq!((n_of(1, "layer"), n_of(0, "layer")), ("1 layer".to_owned(), "0 layers".to_owned()));
        assert_eq!((maybe(None), maybe(Some(0.5))), ("\u{2013}".to_owned(), "0.50".to_owned()));
    }
}
