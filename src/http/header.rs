//! The key as a client sends it: one header line, an RFC 8941 string in quotes or, as Stripe's clients send it, bare.
//!
//! Both spellings of the same characters are the same key. Whatever is neither is refused, never cut, trimmed or
//! ignored: a key that the service took for missing would let the request run unprotected.

use std::fmt;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use crate::key::Key;

/// Why a header is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InvalidHeader {
    /// More than one header line.
    Repeated,
    /// Nothing in it.
    Empty,
    /// More than 255 characters.
    TooLong,
    /// A character that is not visible ASCII.
    NotVisible,
    /// It begins as a quoted string and does not go on as one, or something follows the string.
    BadString,
    /// A bare key, where only quoted ones are taken.
    Bare,
}

impl fmt::Display for InvalidHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Repeated => "it stands on more than one header line",
            Self::Empty => "it is empty",
            Self::TooLong => "it has more than 255 characters",
            Self::NotVisible => "it has a character that is not visible ASCII",
            Self::BadString => "it is not one well-formed quoted string without anything after it",
            Self::Bare => "it is not a quoted string",
        })
    }
}

/// The key in a request's headers; `None` where the header is missing.
pub(super) fn key_in(headers: &HeaderMap, name: &HeaderName, bare: bool) -> Result<Option<Vec<u8>>, InvalidHeader> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (None, _) => Ok(None),
        (Some(_), Some(_)) => Err(InvalidHeader::Repeated),
        (Some(line), None) => key_of(line, bare).map(Some),
    }
}

fn key_of(line: &HeaderValue, bare: bool) -> Result<Vec<u8>, InvalidHeader> {
    let id = match trimmed(line.as_bytes()).strip_prefix(b"\"") {
        Some(rest) => unquoted(rest)?,
        None if line.is_empty() => return Err(InvalidHeader::Empty),
        None if !bare => return Err(InvalidHeader::Bare),
        None => line.as_bytes().to_vec(),
    };
    if id.is_empty() {
        return Err(InvalidHeader::Empty);
    }
    if id.len() > Key::ID_BYTES_MAX {
        return Err(InvalidHeader::TooLong);
    }
    if !id.iter().all(u8::is_ascii_graphic) {
        return Err(InvalidHeader::NotVisible);
    }
    Ok(id)
}

/// A field value without the spaces around it that RFC 8941, section 4.2, has discarded.
fn trimmed(line: &[u8]) -> &[u8] {
    let mut line = line;
    while let Some(rest) = line.strip_prefix(b" ") {
        line = rest;
    }
    while let Some(rest) = line.strip_suffix(b" ") {
        line = rest;
    }
    line
}

/// What stands in an RFC 8941 string, section 4.2.5, whose opening quote was read and which ends the field.
fn unquoted(rest: &[u8]) -> Result<Vec<u8>, InvalidHeader> {
    let mut id = Vec::with_capacity(rest.len());
    let mut bytes = rest.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => return if bytes.next().is_none() { Ok(id) } else { Err(InvalidHeader::BadString) },
            b'\\' => match bytes.next() {
                Some(escaped @ (b'"' | b'\\')) => id.push(escaped),
                _ => return Err(InvalidHeader::BadString),
            },
            b' '..=b'~' => id.push(byte),
            _ => return Err(InvalidHeader::NotVisible),
        }
    }
    Err(InvalidHeader::BadString)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(line: &[u8]) -> Result<Vec<u8>, InvalidHeader> {
        key_of(&HeaderValue::from_bytes(line).unwrap(), true)
    }

    #[test]
    fn quoted_and_bare_are_the_same_key_and_nothing_else_is_one() {
        use InvalidHeader::{BadString, Empty, NotVisible, TooLong};

        let longest = "k".repeat(255);
        let good: [(&[u8], &[u8]); 8] = [
            (b"abc", b"abc"),
            (b"\"abc\"", b"abc"),
            (b"  \"abc\" ", b"abc"),
            (b"a\"b", b"a\"b"),
            (b"\"a\\\"b\"", b"a\"b"),
            (b"\"a\\\\b\"", b"a\\b"),
            (b"AbC", b"AbC"),
            (longest.as_bytes(), longest.as_bytes()),
        ];
        for (line, id) in good {
            assert_eq!(parsed(line).as_deref(), Ok(id), "{line:?}");
        }
        let too_long = "k".repeat(256);
        let quoted_too_long = format!("\"{too_long}\"");
        let bad: [(&[u8], InvalidHeader); 16] = [
            (b"", Empty),
            (b"\"\"", Empty),
            (b"\"abc", BadString),
            (b"\"", BadString),
            (b"\"abc\"x", BadString),
            (b"\"abc\";p=1", BadString),
            (b"\"a\", \"b\"", BadString),
            (b"\"a\\b\"", BadString),
            (b"\"a\\", BadString),
            (b"a b", NotVisible),
            (b" abc", NotVisible),
            (b"\"a b\"", NotVisible),
            (b"\"a\tb\"", NotVisible),
            (b"caf\xc3\xa9", NotVisible),
            (too_long.as_bytes(), TooLong),
            (quoted_too_long.as_bytes(), TooLong),
        ];
        for (line, problem) in bad {
            assert_eq!(parsed(line), Err(problem), "{line:?}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_visible_key_is_itself_in_quotes_and_bare(id in "[!-~]{1,255}") {
            let quoted = format!("\"{}\"", id.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(parsed(quoted.as_bytes()), Ok(id.clone().into_bytes()));
            if !id.starts_with('"') {
                prop_assert_eq!(parsed(id.as_bytes()), Ok(id.clone().into_bytes()));
            }
        }

        #[test]
        fn no_line_makes_a_key_that_is_not_visible_or_has_no_valid_length(line in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(line) = HeaderValue::from_bytes(&line)
                && let Ok(id) = key_of(&line, true)
            {
                prop_assert!(id.iter().all(u8::is_ascii_graphic) && (1..=255).contains(&id.len()));
            }
        }
    }

    #[test]
    fn a_bare_key_is_refused_where_only_quoted_ones_are_taken() {
        assert_eq!(key_of(&HeaderValue::from_static("abc"), false), Err(InvalidHeader::Bare));
        assert_eq!(key_of(&HeaderValue::from_static("\"abc\""), false).as_deref(), Ok(b"abc".as_slice()));
    }

    #[test]
    fn two_header_lines_are_refused_even_when_they_agree() {
        let name = HeaderName::from_static("idempotency-key");
        let mut headers = HeaderMap::new();
        assert_eq!(key_in(&headers, &name, true), Ok(None));
        headers.append(&name, HeaderValue::from_static("abc"));
        assert_eq!(key_in(&headers, &name, true), Ok(Some(b"abc".to_vec())));
        headers.append(&name, HeaderValue::from_static("abc"));
        assert_eq!(key_in(&headers, &name, true), Err(InvalidHeader::Repeated));
    }
}
