//! Errors between a sink and its receiver, as sentences. Errors of libraries name their own types,
//! or say no more than that there was one.

use std::error::Error;
use std::io;
use tokio_rustls::rustls::{self, CertificateError};

/// A connection that was not made, or a handshake that failed.
#[must_use]
pub fn of_connection(error: &io::Error) -> String {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match (inner, error.kind()) {
        (Some(inner), _) => of_tls(inner),
        (None, io::ErrorKind::UnexpectedEof) => {
            "the connection was closed during the TLS handshake: is the port one for TLS?"
                .to_owned()
        }
        _ => error.to_string(),
    }
}

/// A TLS handshake that failed.
#[must_use]
pub fn of_tls(error: &rustls::Error) -> String {
    let said = match error {
        rustls::Error::InvalidCertificate(certificate) => return of_certificate(certificate),
        rustls::Error::InvalidMessage(_) => {
            "the answer is not TLS: does the receiver speak plain HTTP on this port (http://)?"
        }
        rustls::Error::NoCertificatesPresented => "the receiver shows no certificate",
        rustls::Error::PeerIncompatible(_) => {
            "no version or cipher of TLS in common: expected TLS 1.2 or 1.3"
        }
        rustls::Error::NoApplicationProtocol => {
            "the receiver does not speak this version of HTTP: gRPC needs HTTP/2 (ALPN h2)"
        }
        rustls::Error::AlertReceived(alert) => {
            return format!("TLS: the receiver ends the handshake with the alert {alert:?}");
        }
        other => return format!("TLS: {other}"),
    };
    said.to_owned()
}

fn of_certificate(error: &CertificateError) -> String {
    let found = match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has run out",
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet: are both clocks right?"
        }
        CertificateError::Revoked => "was revoked",
        CertificateError::UnknownIssuer => {
            "is of an authority that is not trusted: expected one of reach.ca_file or of the \
             system"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "is for another name than the URL's host"
        }
        CertificateError::BadSignature => "has a signature that is not its authority's",
        CertificateError::BadEncoding => "cannot be read",
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "is not one for servers"
        }
        // The library of certificates names this by a type of its own.
        other if format!("{other:?}").contains("CaUsedAsEndEntity") => {
            "is an authority's own, as self-signed ones are: expected a server's certificate that \
             is signed by \
             an authority of reach.ca_file or of the system"
        }
        other => return format!("the receiver's certificate is not accepted: {other}"),
    };
    format!("the receiver's certificate {found}")
}

/// A request that failed on its way.
#[must_use]
pub fn of_request(error: &hyper::Error) -> String {
    const CLOSED: &str = "the receiver closed the connection before it answered";
    if error.is_incomplete_message() {
        return CLOSED.to_owned();
    }
    if error.is_parse() {
        return "the answer is not HTTP of the version that was asked for: is the protocol (grpc, \
             http) right?"
            .to_owned();
    }
    let mut source = error.source();
    while let Some(inner) = source {
        if let Some(inner) = inner.downcast_ref::<h2::Error>()
            && is_another_protocol(inner)
        {
            return "the receiver does not speak gRPC (HTTP/2): is it an HTTP receiver? Then set \
                    `protocol: http`"
                .to_owned();
        }
        if let Some(inner) = inner.downcast_ref::<io::Error>() {
            return match inner.kind() {
                io::ErrorKind::ConnectionReset => {
                    "the receiver reset the connection while the request was on its way".to_owned()
                }
                io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::UnexpectedEof => {
                    "the receiver closed the connection while the request was on its way".to_owned()
                }
                _ => format!("the connection failed: {inner}"),
            };
        }
        source = inner.source();
    }
    match error.source() {
        // The connection was over before the request was begun.
        _ if error.is_canceled() || error.is_closed() => CLOSED.to_owned(),
        Some(inner) => format!("the connection failed: {inner}"),
        None => format!("the connection failed: {error}"),
    }
}

/// The answer's first bytes were read as the length of a frame, such as `HTT` of HTTP/1.1: no frame
/// is as long as any text says then (RFC 9113, 4.2).
fn is_another_protocol(error: &h2::Error) -> bool {
    error.is_library() && error.reason() == Some(h2::Reason::FRAME_SIZE_ERROR)
}

#[cfg(test)]
mod tests {
    use super::{of_certificate, of_connection, of_tls};
    use std::io;
    use std::sync::Arc;
    use tokio_rustls::rustls::{self, CertificateError, InvalidMessage, OtherError};

    /// As webpki names it.
    #[derive(Debug)]
    struct CaUsedAsEndEntity;

    impl std::fmt::Display for CaUsedAsEndEntity {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "{self:?}")
        }
    }

    impl std::error::Error for CaUsedAsEndEntity {}

    #[test]
    fn what_is_wrong_with_a_certificate_is_said_without_names_of_types() {
        let other = CertificateError::Other(OtherError(Arc::new(CaUsedAsEndEntity)));
        let all = [
            (CertificateError::Expired, "has run out"),
            (CertificateError::NotValidForName, "another name"),
            (CertificateError::UnknownIssuer, "ca_file"),
            (other, "self-signed"),
        ];
        for (error, expected) in all {
            let said = of_certificate(&error);
            assert!(said.contains(expected), "{said}");
            let types = ["Error", "CaUsed", "Invalid", "NotValid", "Unknown", "("];
            assert!(!types.iter().any(|name| said.contains(name)), "{said}");
            let io = io::Error::new(
                io::ErrorKind::InvalidData,
                rustls::Error::InvalidCertificate(error),
            );
            assert_eq!(of_connection(&io), said);
        }
        let plain = rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType);
        assert!(of_tls(&plain).contains("http://"));
        let refused = io::Error::from_raw_os_error(111);
        assert!(of_connection(&refused).contains("Connection refused"));
    }
}
