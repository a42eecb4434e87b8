#!/bin/sh
# Makes an authority and one certificate for each server, for TLS between clients, controller, agents and Redis.
#   deploy/certificates.sh FOLDER NAME[,NAME…] …
# Each argument after FOLDER is one server: the names and addresses by which others connect to it, separated by
# commas; its files are FOLDER/<first of them>.crt and .key. FOLDER/ca.crt is the authority, for all who connect.
# Run again, it keeps the authority and makes new certificates, valid for DAYS (90) days.
set -eu
umask 077
if [ $# -lt 2 ]; then
  sed -n '2,6s/^# *//p' "$0" >&2
  exit 2
fi
folder=$1
shift
mkdir -p "$folder"
key() { openssl genpkey -quiet -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1"; }
if [ ! -e "$folder/ca.key" ]; then
  key "$folder/ca.key"
  openssl req -x509 -new -key "$folder/ca.key" -out "$folder/ca.crt" -days 3650 -subj "/CN=Meshloom authority" \
    -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign
  chmod 644 "$folder/ca.crt"
fi
for names in "$@"; do
  first=${names%%,*}
  alternatives=$(printf '%s' "$names" | tr , '\n' | sed -E '/^[0-9.]+$|:/s/^/IP:/; /^IP:/!s/^/DNS:/' | paste -sd, -)
  key "$folder/$first.key.new"
  openssl req -x509 -new -key "$folder/$first.key.new" -out "$folder/$first.crt.new" -days "${DAYS:-90}" \
    -CA "$folder/ca.crt" -CAkey "$folder/ca.key" -subj "/CN=$first" -addext "subjectAltName=$alternatives" \
    -addext basicConstraints=critical,CA:FALSE -addext extendedKeyUsage=serverAuth,clientAuth
  mv "$folder/$first.key.new" "$folder/$first.key"
  mv "$folder/$first.crt.new" "$folder/$first.crt"
  echo "$folder/$first.crt: $alternatives"
done
