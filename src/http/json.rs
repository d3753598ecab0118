//! JSON texts that say the same, as the same bytes.
//!
//! Members are sorted by name, white space is gone, strings are escaped in one way. Numbers stay as they were written:
//! no float is ever made of one, so that two amounts above 2^53 stay two amounts.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// How deep a text may be nested; each level is read once more than the one around it.
const DEPTH_MAX: usize = 32;

/// The one form of a JSON text; `None` if it is not valid, has a member twice, or is nested too deep.
pub(super) fn canonical(text: &[u8]) -> Option<Vec<u8>> {
    let text: &RawValue = serde_json::from_slice(text).ok()?;
    let mut out = Vec::with_capacity(text.get().len());
    write(text, DEPTH_MAX, &mut out)?;
    Some(out)
}

fn write(value: &RawValue, depth_left: usize, out: &mut Vec<u8>) -> Option<()> {
    let text = value.get();
    match text.as_bytes().first()? {
        b'{' => {
            let Members(mut members) = serde_json::from_str(text).ok()?;
            members.sort_by(|(one, _), (other, _)| one.cmp(other));
            if members.windows(2).any(|pair| matches!(pair, [(one, _), (other, _)] if one == other)) {
                return None;
            }
            out.push(b'{');
            for (at, (name, value)) in members.into_iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                serde_json::to_writer(&mut *out, &name).ok()?;
                out.push(b':');
                write(value, depth_left.checked_sub(1)?, out)?;
            }
            out.push(b'}');
        }
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
            out.push(b'[');
            for (at, item) in items.into_iter().enumerate() {
                if at > 0 {
                    out.push(b',');
                }
                write(item, depth_left.checked_sub(1)?, out)?;
            }
            out.push(b']');
        }
        b'"' => {
            let string: String = serde_json::from_str(text).ok()?;
            serde_json::to_writer(&mut *out, &string).ok()?;
        }
        _ => out.extend_from_slice(text.as_bytes()),
    }
    Some(())
}

/// The members of an object as they were written, in order, also those of one name.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(MembersVisitor)
    }
}

struct MembersVisitor;

impl<'de> Visitor<'de> for MembersVisitor {
    type Value = Members<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Members(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_says_the_same_is_the_same_and_what_does_not_is_not() {
        let same = [
            (r#"{"b":1,"a":{"d":[1, 2 ],"c":null}}"#, r#" {"a" : {"c":null,"d":[1,2]}, "b":1} "#),
            (r#""\u00e9\n""#, "\"\u{e9}\\u000a\""),
            ("[]", "[ ]"),
            ("{}", "{ }"),
            (" true ", "true"),
        ];
        for (one, other) in same {
            let canonical = |text: &str| canonical(text.as_bytes()).unwrap();
            assert_eq!(canonical(one), canonical(other), "{one} {other}");
            assert_eq!(canonical(&String::from_utf8(canonical(one)).unwrap()), canonical(one), "{one}");
        }
        let different = [
            ("[1,2]", "[2,1]"),
            ("9007199254740992", "9007199254740993"),
            ("123456789012345678901234567890.1", "123456789012345678901234567890.2"),
            ("1.0", "1"),
            ("1e2", "100"),
            (r#"{"a":"1"}"#, r#"{"a":1}"#),
            (r#"{"a":[1],"b":2}"#, r#"{"a":[1,2],"b":2}"#),
            (r#"{"a":{"b":1}}"#, r#"{"a":{},"b":1}"#),
        ];
        for (one, other) in different {
            let (one, other) = (canonical(one.as_bytes()).unwrap(), canonical(other.as_bytes()).unwrap());
            assert_ne!(one, other);
        }
    }

    #[test]
    fn what_is_not_valid_ambiguous_or_too_deep_has_no_such_form() {
        let deep = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert!(canonical(deep(DEPTH_MAX + 1).as_bytes()).is_some());
        let too_deep = deep(DEPTH_MAX + 2);
        let by_far = deep(100_000);
        let none = ["", "{", "[1,]", "01", "{\"a\":1,\"a\":1}", "{\"a\":1,\"\\u0061\":2}", "1 2", &too_deep, &by_far];
        for text in none {
            assert_eq!(canonical(text.as_bytes()), None, "{text:.40}");
        }
        assert_eq!(canonical(b"\"\xff\""), None);
    }
}
