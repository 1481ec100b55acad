//! Whether a rule allows a text: what the tests of rules hold them to.
//!
//! Never reads more than such rules have: sequences, alternatives, groups, texts, classes, and repetitions of the last three.

/// Whether `rule` allows the whole of `text`.
pub(super) fn allows(rule: &str, text: &str) -> bool {
    ends(rule.trim(), text).contains(&"")
}

/// What can be left of `text` once `rule` has taken its part.
fn ends<'a>(rule: &str, text: &'a str) -> Vec<&'a str> {
    split(rule, '|').iter().flat_map(|choice| sequence(choice.trim(), text)).collect()
}

fn sequence<'a>(rule: &str, text: &'a str) -> Vec<&'a str> {
    let mut left = vec![text];
    for item in split(rule, ' ').iter().map(|item| item.trim()).filter(|item| !item.is_empty()) {
        left = left.into_iter().flat_map(|text| repeated(item, text)).collect();
    }
    left
}

fn repeated<'a>(item: &str, text: &'a str) -> Vec<&'a str> {
    let (once, least, most) = match item.strip_suffix('?') {
        Some(once) => (once, 0, 1),
        None => match item.strip_suffix('}').and_then(|item| item.rsplit_once('{')) {
            Some((once, counts)) => {
                let (least, most) = counts.split_once(',').unwrap_or((counts, counts));
                (once, least.parse().expect("a number"), most.parse().expect("a number"))
            }
            None => (item, 1, 1),
        },
    };
    let (mut left, mut all) = (vec![text], Vec::new());
    for n in 0..=most {
        if n >= least {
            all.extend(&left);
        }
        left = left.into_iter().flat_map(|text| one(once, text)).collect();
    }
    all
}

fn one<'a>(item: &str, text: &'a str) -> Vec<&'a str> {
    if let Some(inner) = item.strip_prefix('(') {
        return ends(inner.strip_suffix(')').expect("closed"), text);
    }
    if let Some(literal) = item.strip_prefix('"') {
        return text.strip_prefix(literal.strip_suffix('"').expect("closed")).into_iter().collect();
    }
    let class = item.trim_matches(['[', ']']);
    let (a, b) = class.split_once('-').unwrap_or((class, class));
    let fits = |digit: u8| a.as_bytes()[0] <= digit && digit <= b.as_bytes()[0];
    text.bytes().next().filter(|&digit| fits(digit)).map(|_| &text[1..]).into_iter().collect()
}

fn split(rule: &str, at: char) -> Vec<String> {
    let (mut parts, mut depth) = (vec![String::new()], 0);
    for c in rule.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        if c == at && depth == 0 {
            parts.push(String::new());
        } else {
            parts.last_mut().expect("one").push(c);
        }
    }
    parts
}
