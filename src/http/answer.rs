//! The form in which an answer is stored.
//!
//! # Bytes
//!
//! Version 1; numbers are little-endian; golden values in the tests freeze it.
//!
//! | bytes | what |
//! |---|---|
//! | 1 | version: 1 |
//! | 2 | status |
//! | 2 | number of header lines |
//! | each | 2: length of the name, the name; 4: length of the value, the value |
//! | 2 | number of trailer lines, plus 1; 0 where there are no trailers |
//! | each | as a header line |
//! | the rest | the body |
//!
//! A completion without body has the same form in its reference, with the handler's reference in place of the body.
//! Bytes that do not read as this form are refused and never shown to a client.

use bytes::Bytes;
use http::header::{
    ACCEPT_RANGES, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_RANGE,
    CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, TRAILER,
};
use http::{Response, StatusCode};

const VERSION: u8 = 1;

/// An answer as it is stored and replayed: status, header lines in order, body, trailers.
///
/// A [cleaner](super::IdempotencyLayer::clean) is shown it before it is stored, and a reconciler or a completer makes
/// one of the outcome that it found out about:
///
/// ```
/// use keyonce::http::Answer;
///
/// let answer = Answer::new(http::StatusCode::CREATED, "charged 9.99 EUR")
///     .header(http::header::CONTENT_TYPE, http::HeaderValue::from_static("text/plain"));
/// let stored = answer.to_bytes().expect("its headers are short");
/// assert_eq!(Answer::from_bytes(&stored), Some(answer)); // `Interrupted::resolve(&stored)` stores it
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The header lines.
    pub headers: HeaderMap,
    /// The body, byte for byte.
    pub body: Bytes,
    /// The trailer lines, where there are trailers.
    pub trailers: Option<HeaderMap>,
}

impl Answer {
    /// An answer without header lines and trailers.
    pub fn new(status: StatusCode, body: impl Into<Bytes>) -> Self {
        Self { status, headers: HeaderMap::new(), body: body.into(), trailers: None }
    }

    /// Adds a header line.
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.append(name, value);
        self
    }

    /// The stored form; `None` where there are more lines, or longer ones, than it has room for.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut out = Vec::with_capacity(64 + self.body.len());
        out.push(VERSION);
        out.extend(self.status.as_u16().to_le_bytes());
        out.extend(u16::try_from(self.headers.len()).ok()?.to_le_bytes());
        write_lines(&mut out, &self.headers)?;
        match &self.trailers {
            None => out.extend(0_u16.to_le_bytes()),
            Some(trailers) => {
                out.extend(u16::try_from(trailers.len()).ok()?.checked_add(1)?.to_le_bytes());
                write_lines(&mut out, trailers)?;
            }
        }
        out.extend_from_slice(&self.body);
        Some(out)
    }

    /// Reads the stored form; `None` if these bytes are none.
    pub fn from_bytes(stored: &[u8]) -> Option<Self> {
        let mut rest = stored;
        let [version] = take(&mut rest)?;
        if version != VERSION {
            return None;
        }
        let status = StatusCode::from_u16(u16::from_le_bytes(take(&mut rest)?)).ok()?;
        let headers = read_lines(&mut rest)?;
        let trailers = match u16::from_le_bytes(take(&mut rest)?).checked_sub(1) {
            None => None,
            Some(lines) => Some(read_that_many(&mut rest, lines)?),
        };
        Some(Self { status, headers, body: Bytes::copy_from_slice(rest), trailers })
    }

    /// The answer without its body and what tells of it, and with a reference in its place.
    pub(super) fn without_body(self, reference: Bytes) -> Self {
        let of_body = [
            CONTENT_TYPE,
            CONTENT_LENGTH,
            CONTENT_ENCODING,
            CONTENT_LANGUAGE,
            CONTENT_DISPOSITION,
            CONTENT_RANGE,
            ACCEPT_RANGES,
            TRAILER,
            HeaderName::from_static("content-md5"),
            HeaderName::from_static("content-digest"),
            HeaderName::from_static("repr-digest"),
            HeaderName::from_static("digest"),
        ];
        Self { status: self.status, headers: without(&self.headers, &of_body), body: reference, trailers: None }
    }

    /// The answer as a response without a body, which its caller takes.
    pub(super) fn into_response(self) -> (Response<()>, Bytes, Option<HeaderMap>) {
        let mut response = Response::new(());
        *response.status_mut() = self.status;
        *response.headers_mut() = self.headers;
        (response, self.body, self.trailers)
    }
}

/// The lines but for these. Made anew: to remove a line of a map changes the order of the others.
pub(super) fn without(headers: &HeaderMap, names: &[HeaderName]) -> HeaderMap {
    let mut left = HeaderMap::new();
    for (name, value) in headers.iter().filter(|(name, _)| !names.contains(name)) {
        left.append(name.clone(), value.clone());
    }
    left
}

fn write_lines(out: &mut Vec<u8>, lines: &HeaderMap) -> Option<()> {
    for (name, value) in lines {
        out.extend(u16::try_from(name.as_str().len()).ok()?.to_le_bytes());
        out.extend_from_slice(name.as_str().as_bytes());
        out.extend(u32::try_from(value.len()).ok()?.to_le_bytes());
        out.extend_from_slice(value.as_bytes());
    }
    Some(())
}

fn read_lines(rest: &mut &[u8]) -> Option<HeaderMap> {
    let lines = u16::from_le_bytes(take(rest)?);
    read_that_many(rest, lines)
}

fn read_that_many(rest: &mut &[u8], lines: u16) -> Option<HeaderMap> {
    let mut headers = HeaderMap::new();
    for _ in 0..lines {
        let name_len = u16::from_le_bytes(take(rest)?);
        let name = HeaderName::from_bytes(take_bytes(rest, usize::from(name_len))?).ok()?;
        let value_len = usize::try_from(u32::from_le_bytes(take(rest)?)).ok()?;
        let value = HeaderValue::from_bytes(take_bytes(rest, value_len)?).ok()?;
        headers.try_append(name, value).ok()?;
    }
    Some(headers)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk::<N>()?;
    *rest = tail;
    Some(*head)
}

fn take_bytes<'a>(rest: &mut &'a [u8], bytes: usize) -> Option<&'a [u8]> {
    let (head, tail) = rest.split_at_checked(bytes)?;
    *rest = tail;
    Some(head)
}

#[cfg(test)]
mod tests {
    use http::header::SET_COOKIE;

    use super::*;

    fn an_answer() -> Answer {
        let mut answer = Answer::new(StatusCode::CREATED, "done")
            .header(SET_COOKIE, HeaderValue::from_static("a=1"))
            .header(CONTENT_TYPE, HeaderValue::from_bytes(b"x/\xe9").unwrap())
            .header(SET_COOKIE, HeaderValue::from_static("b=2"));
        let mut trailers = HeaderMap::new();
        trailers.append("grpc-status", HeaderValue::from_static("0"));
        answer.trailers = Some(trailers);
        answer
    }

    #[test]
    fn the_stored_form_is_frozen() {
        let mut golden = b"\x01\xc9\x00\x03\x00".to_vec();
        golden.extend(b"\x0a\x00set-cookie\x03\x00\x00\x00a=1");
        golden.extend(b"\x0a\x00set-cookie\x03\x00\x00\x00b=2");
        golden.extend(b"\x0c\x00content-type\x03\x00\x00\x00x/\xe9");
        golden.extend(b"\x02\x00\x0b\x00grpc-status\x01\x00\x00\x000");
        golden.extend(b"done");
        assert_eq!(an_answer().to_bytes().unwrap(), golden);
        assert_eq!(Answer::new(StatusCode::NO_CONTENT, "").to_bytes().unwrap(), b"\x01\xcc\x00\x00\x00\x00\x00");
    }

    #[test]
    fn what_was_stored_comes_back_and_the_order_of_lines_with_it() {
        let answer = an_answer();
        let back = Answer::from_bytes(&answer.to_bytes().unwrap()).unwrap();
        assert_eq!(back, answer);
        assert!(back.headers.iter().eq(answer.headers.iter()));
        assert_eq!(back.to_bytes(), answer.to_bytes());
    }

    #[test]
    fn bytes_of_another_form_are_refused() {
        let stored = an_answer().to_bytes().unwrap();
        let body_at = stored.len() - "done".len();
        for cut in 0..body_at {
            assert_eq!(Answer::from_bytes(&stored[..cut]), None, "cut at {cut}");
        }
        assert_eq!(Answer::from_bytes(b"charged 9.99 EUR"), None);
        let mut newer = stored.clone();
        newer[0] = 2;
        assert_eq!(Answer::from_bytes(&newer), None);
        let mut odd = stored;
        odd[1] = 0;
        odd[2] = 0;
        assert_eq!(Answer::from_bytes(&odd), None);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn no_bytes_make_a_reader_panic_and_what_reads_is_written_again(
            flips in proptest::collection::vec((0_usize..80, proptest::prelude::any::<u8>()), 0..4),
        ) {
            let mut stored = an_answer().to_bytes().unwrap();
            for (at, byte) in flips {
                let at = at % stored.len();
                stored[at] = byte;
            }
            if let Some(answer) = Answer::from_bytes(&stored) {
                let again = Answer::from_bytes(&answer.to_bytes().unwrap());
                proptest::prop_assert_eq!(again, Some(answer));
            }
        }
    }

    #[test]
    fn no_trailers_and_empty_trailers_are_two_things() {
        for trailers in [None, Some(HeaderMap::new())] {
            let answer = Answer { trailers, ..an_answer() };
            assert_eq!(Answer::from_bytes(&answer.to_bytes().unwrap()), Some(answer));
        }
    }
}
